"""Decides which policy governs which module: an ordered map from patterns to policies."""

import dataclasses
import difflib
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from jmp_policy._src.core.dtypes import check_has_range, is_half
from jmp_policy._src.core.suggest import check_keys
from jmp_policy._src.policy.boundary import policy_changes
from jmp_policy._src.policy.pattern_text import pattern_from_text, pattern_to_text
from jmp_policy._src.policy.policy import Policy, PolicyLike, get_policy

#: A path glob, a module class, or a predicate `(path, module) -> bool`; path is "encoder/layer_0".
Pattern: TypeAlias = str | type | Callable[[str, Any], bool]


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class PolicyMap:
    """Default policy of a model, and overrides for the modules that match a pattern.

    A rule governs the module it matches and everything below it, unless something below is matched
    itself. Among rules that match the same module the first listed wins.

    Args:
      default: policy (or its text) of every module that no rule governs.
      overrides: mapping, or sequence of pairs, from pattern to policy. A pattern is a path glob whose
        `*` stays within one name and whose `**` spans any number of them
        (`"decoder/layer_*/attention"`, `"**/head"`), a module class (matched with `isinstance`), or a
        predicate `(path, module) -> bool` with the path as text.
      keep_module_dtypes: let the `dtype=` field of a module win over the policy. Off by default: published
        Flax models pass `dtype=jnp.float32` to every layer, and a policy that yielded would do nothing.
      float32_islands: compute normalisation layers and the softmax of attention in float32 wherever a
        policy computes in 16 bits or fewer. A rule that matches a normalisation layer by its class or
        by its name overrides this for that layer.
      keep_small_inputs: where a policy computes in 16 bits or fewer, do not cast floating inputs that are
        scalars, or vectors next to inputs of higher rank (a noise level or a time per example). They cost
        nothing, and a logarithm or a high frequency of them is wrong in half precision.

    Raises:
      TypeError, ValueError: for something that is not a pattern or not a policy.

    Example:
      >>> rules = PolicyMap("mixed_float16", {"decoder/head": "float32"})
      >>> str(rules.resolve("decoder/head/Dense_0").compute_dtype)
      'float32'
      >>> str(rules.resolve("encoder").compute_dtype)
      'float16'
    """

    default: Policy
    overrides: tuple[tuple[Pattern, Policy], ...]
    keep_module_dtypes: bool
    float32_islands: bool
    keep_small_inputs: bool

    def __init__(
        self,
        default: PolicyLike,
        overrides: Mapping[Pattern, PolicyLike] | Sequence[tuple[Pattern, PolicyLike]] = (),
        *,
        keep_module_dtypes: bool = False,
        float32_islands: bool = True,
        keep_small_inputs: bool = True,
    ):
        # A ConfigDict is like a mapping, and none.
        pairs = getattr(overrides, "items", lambda: overrides)()
        checked = tuple((_check_pattern(p), get_policy(policy)) for p, policy in _as_pairs(pairs))
        object.__setattr__(self, "default", get_policy(default))
        object.__setattr__(self, "overrides", checked)
        object.__setattr__(self, "keep_module_dtypes", bool(keep_module_dtypes))
        object.__setattr__(self, "float32_islands", bool(float32_islands))
        object.__setattr__(self, "keep_small_inputs", bool(keep_small_inputs))
        # Kept: the map is part of every jit cache key that is looked up while it is active.
        object.__setattr__(self, "_hash", hash(self._key()))

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PolicyMap) and self._key() == other._key()

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Hashes of classes and strings differ between processes.
        self.__dict__.update(state)
        object.__setattr__(self, "_hash", hash(self._key()))

    def __repr__(self) -> str:
        rules = "".join(f", {show_pattern(p)}: {str(policy)!r}" for p, policy in self.overrides)
        flags = "".join(f", {name}={value}" for name, value in self._changed_flags().items())
        inside = f", {{{rules[2:]}}}" if rules else ""
        return f"PolicyMap({str(self.default)!r}{inside}{flags})"

    def to_dict(self) -> dict[str, Any]:
        """Returns `{"policy": text, "rules": [[pattern, policy], ...]}`, and the flags that are not default.

        Classes and functions are written as "module:name", such as "flax.linen:Dense".

        Raises:
          ValueError: for a pattern that cannot be imported by name, such as a lambda.
        """
        pairs = [[pattern_to_text(pattern), str(policy)] for pattern, policy in self.overrides]
        rules = {"rules": pairs} if pairs else {}
        return {"policy": str(self.default), **rules, **self._changed_flags()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "PolicyMap":
        """Reads what `to_dict` returns; `rules` may be a mapping from pattern to policy too.

        Raises:
          ValueError, TypeError: for unknown keys, patterns that cannot be imported, and what is no policy.
        """
        check_keys(settings, ("policy", "rules", *FLAGS), "a PolicyMap")
        if "policy" not in settings:
            raise ValueError(f"The settings of a PolicyMap need the key 'policy', got {dict(settings)!r}.")
        rules = settings.get("rules") or ()
        pairs = _as_pairs(rules.items() if isinstance(rules, Mapping) else rules)
        overrides = [(pattern_from_text(pattern), policy) for pattern, policy in pairs]
        flags = {name: settings[name] for name in FLAGS if name in settings}
        return cls(settings["policy"], overrides, **flags)

    def match(self, path: str | Sequence[Any], module: Any = None) -> int | None:
        """Returns the index of the first rule whose pattern matches this very module, or None."""
        text = path_text(path)
        for index, (pattern, _) in enumerate(self.overrides):
            if matches(pattern, text, module):
                return index
        return None

    def resolve(
        self,
        path: str | Sequence[Any],
        module: Any = None,
        ancestors: Iterable[tuple[str | Sequence[Any], Any]] | None = None,
    ) -> Policy:
        """Returns the policy that governs a module.

        Args:
          path: where the module is: `"decoder/layer_0"`, or its names in sequence.
          module: the module itself, for patterns that are classes or predicates.
          ancestors: `(path, module)` of the modules above, nearest first. Left out, only the paths of the
            ancestors are known, so that only path patterns can match them.
        """
        above = _paths_above(path) if ancestors is None else ancestors
        for place, candidate in ((path, module), *above):
            index = self.match(place, candidate)
            if index is not None:
                return self.overrides[index][1]
        return self.default

    def names(self, index: int, module: Any) -> bool:
        """Returns whether rule `index` singles out its module, instead of matching it along with all others.

        A class pattern does unless it is a base class of all modules; a path does unless its last part is a
        bare `*` or `**`; a predicate always does.
        """
        pattern = self.overrides[index][0]
        if isinstance(pattern, str):
            return pattern.rsplit("/", 1)[-1] not in ("*", "**")
        if isinstance(pattern, type):
            # nn.Module and object match everything.
            return pattern.__name__ not in ("Module", "Pytree", "object")
        return True

    def unused(self, modules: Iterable[tuple[str | Sequence[Any], Any]]) -> tuple[Pattern, ...]:
        """Returns the patterns that match none of the given modules.

        Args:
          modules: `(path, module)` of every module of the model.
        """
        places = [(path_text(path), module) for path, module in modules]
        return tuple(
            pattern
            for pattern, _ in self.overrides
            if not any(matches(pattern, path, module) for path, module in places)
        )

    def relative_to(self, path: str | Sequence[Any], policy: Policy) -> "PolicyMap":
        """Returns the same rules for a part of the model, with paths counted from that part.

        Args:
          path: where the part is in the larger model.
          policy: the policy that governs the part itself.
        """
        start = path_text(path)
        names = [name for name in start.split("/") if name]
        overrides: list[tuple[Pattern, Policy]] = []
        for pattern, override in self.overrides:
            if isinstance(pattern, str):
                parts = [part for part in pattern.split("/") if part]
                rest = dict.fromkeys("/".join(r) for r in _remaining_globs(parts, names) if r)
                overrides += [(glob, override) for glob in rest]
            elif isinstance(pattern, type):
                overrides.append((pattern, override))
            else:
                overrides.append((PredicateOnWholePath(pattern, start), override))
        return self._with(policy, overrides)

    def without_output_cast(self, policy: Policy) -> "PolicyMap":
        """Returns the same rules, with a policy's outputs in compute dtype for code under that policy."""

        def replaced(p: Policy) -> Policy:
            return p if policy_changes(p, policy) else p.with_output_dtype(p.compute_dtype)

        return self._with(replaced(self.default), [(pattern, replaced(p)) for pattern, p in self.overrides])

    def with_recipe(self, recipe: str) -> "PolicyMap":
        """Returns the same rules with a recipe in the default policy."""
        return self._with(dataclasses.replace(self.default, recipe=recipe), [*self.overrides])

    def _with(self, default: Policy, overrides: list[tuple[Pattern, Policy]]) -> "PolicyMap":
        return PolicyMap(default, overrides, **self._flags())

    def _flags(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in FLAGS}

    def _changed_flags(self) -> dict[str, bool]:
        return {name: value for name, value in self._flags().items() if value != FLAGS[name]}


#: The flags of a `PolicyMap`, with their defaults.
FLAGS = {
    parameter.name: parameter.default
    for parameter in inspect.signature(PolicyMap).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
}


@dataclasses.dataclass(frozen=True)
class PredicateOnWholePath:
    """Predicate on the modules of a part of a model, which calls the user's with paths of the whole model."""

    predicate: Callable[[str, Any], bool]
    start: str

    def __call__(self, path: str, module: Any) -> bool:
        return self.predicate("/".join(part for part in (self.start, path) if part), module)


#: What `wrap` and `intercept` take.
PolicyMapLike: TypeAlias = PolicyMap | Policy | str


def as_policy_map(policy: PolicyMapLike) -> PolicyMap:
    """Returns the rules that are to be applied: a `PolicyMap` unchanged, else one without overrides.

    Raises:
      ValueError: for policies that compute, store or hand on values in 8 bits.
    """
    rules = policy if isinstance(policy, PolicyMap) else PolicyMap(policy)
    for given in (rules.default, *(p for _, p in rules.overrides)):
        for dtype in (given.param_dtype, given.compute_dtype, given.output_dtype):
            check_has_range(dtype, f"The policy {str(given)!r}")
    return rules


def check_grad_dtypes(rules: PolicyMap) -> None:
    """Raises ValueError for policies whose `grad_dtype` no product can return."""
    for policy in (rules.default, *(p for _, p in rules.overrides)):
        grad = policy.grad_dtype
        if grad in (None, policy.compute_dtype):
            continue
        if grad != np.float32:
            raise ValueError(
                f"The policy {str(policy)!r} asks for weight gradients in {grad.name}. Products of "
                f"{policy.compute_dtype.name} return that or what they accumulate in: leave grad out, or "
                "set it to float32."
            )
        if is_half(policy.param_dtype):
            raise ValueError(
                f"The policy {str(policy)!r} asks for float32 gradients of {policy.param_dtype.name} "
                "parameters, and JAX gives gradients the dtype of the parameters. Keep them in float32: "
                "params=float32."
            )


def path_text(path: str | Sequence[Any]) -> str:
    """Returns the text of a path: names joined by slashes, "" for the root."""
    return path if isinstance(path, str) else "/".join(map(str, path))


def matches(pattern: Pattern, path: str, module: Any) -> bool:
    """Returns whether one pattern matches one module; without a module only path patterns can."""
    if isinstance(pattern, str):
        return _glob_matches(pattern, path)
    if module is None:
        return False
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return bool(pattern(path, module))


def show_pattern(pattern: Pattern) -> str:
    """Formats a pattern as the user wrote it."""
    if isinstance(pattern, str):
        return repr(pattern)
    return getattr(pattern, "__qualname__", None) or repr(pattern)


def unused_error(unused: Sequence[Pattern], model: str, paths: Iterable[str]) -> ValueError:
    """Makes the error for rules that match nothing, with the nearest real paths."""
    known = sorted({path for path in paths if path})
    lines = []
    for pattern in unused:
        line = f"The rule for {show_pattern(pattern)} matches no module of {model}."
        if isinstance(pattern, str):
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
            if near:
                line += f" The nearest paths are {', '.join(map(repr, near))}."
        lines.append(line)
    return ValueError(
        "\n".join(lines)
        + "\nA path pattern is matched against the whole path ('**/head' finds a head at any depth); a "
        "class is matched with isinstance."
    )


def _paths_above(path: str | Sequence[Any]) -> list[tuple[str, None]]:
    names = [name for name in path_text(path).split("/") if name]
    return [("/".join(names[:depth]), None) for depth in range(len(names) - 1, -1, -1)]


@functools.lru_cache(maxsize=4096)
def _glob_matches(glob: str, path: str) -> bool:
    return _parts_match([p for p in glob.split("/") if p], [n for n in path.split("/") if n])


def _parts_match(parts: list[str], names: list[str]) -> bool:
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_parts_match(parts[1:], names[skip:]) for skip in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and _parts_match(parts[1:], names[1:])


def _remaining_globs(parts: list[str], names: list[str]) -> list[list[str]]:
    """Returns the globs that the rest of a path must match after its first parts, `names`, matched."""
    if not names:
        return [parts]
    if not parts:
        return []
    if parts[0] == "**":
        return [
            parts,
            *(rest for skip in range(len(names)) for rest in _remaining_globs(parts[1:], names[skip:])),
        ]
    return _remaining_globs(parts[1:], names[1:]) if fnmatch.fnmatchcase(names[0], parts[0]) else []


def _as_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    try:
        return [(pattern, policy) for pattern, policy in pairs]
    except (TypeError, ValueError) as error:
        raise TypeError(
            "The overrides of a PolicyMap are a mapping {pattern: policy} or a sequence of "
            f"(pattern, policy) pairs; got {pairs!r}."
        ) from error


def _check_pattern(pattern: Any) -> Pattern:
    if isinstance(pattern, type | str):
        return pattern
    if callable(pattern):
        try:
            inspect.signature(pattern).bind("path", None)
        except TypeError as error:
            name = show_pattern(cast(Pattern, pattern))
            raise TypeError(f"The predicate {name} of a PolicyMap must take (path, module).") from error
        except ValueError:
            pass  # A builtin has no signature to check; a wrong one fails when it is called.
        return cast(Pattern, pattern)
    if isinstance(pattern, re.Pattern):
        raise TypeError(
            f"A pattern of a PolicyMap is no regular expression; got {pattern!r}. Write a path glob "
            "('decoder/layer_*'), or a predicate: lambda path, module: expression.search(path) is not None."
        )
    raise TypeError(
        "A pattern of a PolicyMap is a path glob, a module class or a predicate (path, module) -> "
        f"bool; got {pattern!r} of type {type(pattern).__name__}."
    )
