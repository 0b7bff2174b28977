"""Patterns of rules: what they match; how rules are looked up, checked, shown, and written in a file."""

import dataclasses
import difflib
import fnmatch
import functools
import importlib
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias, cast

from jmp_policy._src.core.suggest import check_keys
from jmp_policy._src.policy.module_precision import policy_changes
from jmp_policy._src.policy.policy import Policy

#: A path glob, a module class, or a predicate `(path, module) -> bool`; path is "encoder/layer_0".
Pattern: TypeAlias = str | type | Callable[[str, Any], bool]


def path_text(path: str | Sequence[Any]) -> str:
    """The text of a path: names joined by slashes, "" for the root."""
    return path if isinstance(path, str) else "/".join(map(str, path))


def matches(pattern: Pattern, path: str, module: Any) -> bool:
    """Whether one pattern matches one module; without a module only path patterns can."""
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


def singles_out(pattern: Pattern) -> bool:
    """Whether a rule with this pattern means the very modules that it matches, and not just all of them.

    A class pattern does unless it is a base class of all modules; a path does unless its last part is a bare
    `*` or `**`; a predicate always does.
    """
    if isinstance(pattern, str):
        return pattern.rsplit("/", 1)[-1] not in ("*", "**")
    if isinstance(pattern, type):
        # nn.Module and object match everything.
        return pattern.__name__ not in ("Module", "Pytree", "object")
    return True


def _glob_matches(glob: str, path: str) -> bool:
    return any(set(rest) <= {"**"} for rest in _rests(_names(glob), _names(path)))


def _names(path: str) -> tuple[str, ...]:
    return tuple(name for name in path.split("/") if name)


@functools.lru_cache(maxsize=4096)
def _rests(parts: tuple[str, ...], names: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    """What may be left of a glob once it has matched some names.

    Memoised: many "**" would take exponential time otherwise.
    """
    if not names:
        return frozenset({parts})
    if parts[:1] == ("**",):
        return _rests(parts[1:], names) | _rests(parts, names[1:])
    if parts and fnmatch.fnmatchcase(names[0], parts[0]):
        return _rests(parts[1:], names[1:])
    return frozenset()


def patterns_below(pattern: Pattern, start: str) -> list[Pattern]:
    """What a pattern comes to for the part of a model at `start`, whose paths are counted from there."""
    if isinstance(pattern, str):
        return ["/".join(rest) for rest in sorted(_rests(_names(pattern), _names(start))) if rest]
    return [pattern if isinstance(pattern, type) else PredicateOnWholePath(pattern, start)]


def path_inside(pattern: Pattern, model: str) -> Pattern:
    """A path pattern without the model's own name at its start; another pattern as it is."""
    if not isinstance(pattern, str):
        return pattern
    names = _names(pattern)
    while names and names[0].partition(".")[0] == model:
        names = names[1:]
    return "/".join(names)


@dataclasses.dataclass(frozen=True)
class PredicateOnWholePath:
    """Predicate on the modules of a part of a model: the user's, called with paths of the whole model."""

    predicate: Callable[[str, Any], bool]
    start: str

    def __call__(self, path: str, module: Any) -> bool:
        return self.predicate("/".join(part for part in (self.start, path) if part), module)


def checked_pairs(overrides: Any) -> list[tuple[Pattern, Any]]:
    """Rules as pairs of a pattern and what stands for it.

    Raises:
      TypeError: for what is neither a mapping nor pairs, and for what is no pattern.
    """
    # A ConfigDict is like a mapping, and none.
    pairs = getattr(overrides, "items", lambda: overrides)()
    try:
        pairs = [(pattern, policy) for pattern, policy in pairs]
    except (TypeError, ValueError) as error:
        raise TypeError(
            "Rules are a mapping {pattern: policy} or a sequence of (pattern, policy) pairs; got "
            f"{pairs!r}."
        ) from error
    return [(_check_pattern(pattern), policy) for pattern, policy in pairs]


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


def pattern_to_text(pattern: Any) -> str:
    """A path glob as it is; a class or function as "module:name".

    Raises:
      ValueError: for a class or function that cannot be imported by its name, such as a lambda.
    """
    if isinstance(pattern, str):
        return pattern
    name = getattr(pattern, "__qualname__", None) or repr(pattern)
    text = f"{getattr(pattern, '__module__', None)}:{name}"
    try:
        found = pattern_from_text(text)
    except ValueError:
        found = None
    if found is not pattern:
        raise ValueError(
            f"The pattern {name} cannot be written as text: that holds path globs, and classes and functions "
            "that can be imported by name. Define it at the top of a module, or match by path."
        )
    return text


def pattern_from_text(text: Any) -> Any:
    """Imports the class or function that "module:name" names, and returns anything else as it is.

    Raises:
      ValueError: for a name that cannot be imported.
    """
    if not isinstance(text, str) or ":" not in text:
        return text
    module, _, name = text.partition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"The pattern {text!r} names a class or function that cannot be imported ({error}). It is "
            "written 'module:name', such as 'flax.linen:Dense'; a path glob has no colon."
        ) from error


class Rules:
    """Base class of `PolicyMap`: how its rules are looked up, shown, and written as a dict."""

    default: Any
    overrides: Any
    _flags: Any

    def match(self, path: str | Sequence[Any], module: Any = None) -> int | None:
        """The index of the first rule whose pattern matches this very module, or None."""
        text = path_text(path)
        found = (i for i, (pattern, _) in enumerate(self.overrides) if matches(pattern, text, module))
        return next(found, None)

    def governing(self, path: str | Sequence[Any], module: Any = None) -> int | None:
        """The index of the rule that governs a module, as `resolve` finds it; None for the default."""
        names = _names(path_text(path))
        above = (("/".join(names[:depth]), None) for depth in range(len(names) - 1, -1, -1))
        found = (self.match(*place) for place in ((path, module), *above))
        return next((i for i in found if i is not None), None)

    def resolve(self, path: str | Sequence[Any], module: Any = None) -> Policy:
        """The policy that governs a module.

        Args:
          path: where the module is: `"decoder/layer_0"`, or its names in sequence. Of the modules above it,
            only the paths are known, so that only path patterns can match them.
          module: the module itself, for patterns that are classes or predicates.
        """
        index = self.governing(path, module)
        return self.default if index is None else self.overrides[index][1]

    def unused(self, modules: Iterable[tuple[str | Sequence[Any], Any]]) -> tuple[Pattern, ...]:
        """The patterns that match none of the modules of a model, given as pairs `(path, module)`."""
        met = [(path_text(path), module) for path, module in modules]
        patterns = (pattern for pattern, _ in self.overrides)
        return tuple(p for p in patterns if not any(matches(p, *place) for place in met))

    def relative_to(self, path: str | Sequence[Any], policy: Policy) -> Self:
        """The same rules for a part of the model, with paths counted from that part.

        Args:
          path: where the part is in the larger model.
          policy: the policy that governs the part itself.
        """
        start = path_text(path)
        below = [(p, override) for whole, override in self.overrides for p in patterns_below(whole, start)]
        return self._changed(default=policy, overrides=below)

    def without_output_cast(self, policy: Policy) -> Self:
        """The same rules, with a policy's outputs in compute dtype for code under that policy."""

        def replaced(p: Policy) -> Policy:
            return p if policy_changes(p, policy) else p.with_output_dtype(p.compute_dtype)

        overrides = [(pattern, replaced(p)) for pattern, p in self.overrides]
        return self._changed(default=replaced(self.default), overrides=overrides)

    def with_recipe(self, recipe: str) -> Self:
        """The same rules with a recipe in the default policy."""
        return self._changed(default=dataclasses.replace(self.default, recipe=recipe))

    def _changed(self, **fields: Any) -> Self:
        return dataclasses.replace(self, **fields)  # type: ignore[type-var]

    def __repr__(self) -> str:
        rules = "".join(f", {show_pattern(p)}: {str(policy)!r}" for p, policy in self.overrides)
        flags = "".join(f", {name}={value}" for name, value in self._changed_flags().items())
        inside = f", {{{rules[2:]}}}" if rules else ""
        return f"PolicyMap({str(self.default)!r}{inside}{flags})"

    def to_dict(self) -> dict[str, Any]:
        """A dict `{"policy": text, "rules": [[pattern, policy], ...]}`, and the flags that are not default.

        Classes and functions are written as "module:name", such as "flax.linen:Dense".

        Raises:
          ValueError: for a pattern that cannot be imported by name, such as a lambda.
        """
        pairs = [[pattern_to_text(pattern), str(policy)] for pattern, policy in self.overrides]
        rules = {"rules": pairs} if pairs else {}
        return {"policy": str(self.default), **rules, **self._changed_flags()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` returns; `rules` may be a mapping from pattern to policy too.

        Raises:
          ValueError, TypeError: for unknown keys, patterns that cannot be imported, and what is no policy.
        """
        make: Any = cls
        check_keys(settings, ("policy", "rules", *cls._flags), "a PolicyMap")
        if "policy" not in settings:
            raise ValueError(f"The settings of a PolicyMap need the key 'policy', got {dict(settings)!r}.")
        rules = settings.get("rules") or ()
        overrides = [(pattern_from_text(pattern), policy) for pattern, policy in checked_pairs(rules)]
        flags = {name: settings[name] for name in cls._flags if name in settings}
        return make(settings["policy"], overrides, **flags)

    def _changed_flags(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in self._flags if getattr(self, name) != self._flags[name]}


class HoldsRules(Protocol):
    """What has rules as its `policy`: a `Precision`."""

    @property
    def policy(self) -> Rules:
        """The rules."""
        ...


def wrapped_twice(module: str, old: Any, new: Any) -> ValueError:
    """Makes the error for a module that is wrapped already, under other rules."""
    return ValueError(
        f"{module} is wrapped already, under {old!r}; wrapped again, under {new!r}, it would lose that. Keep "
        "one of the two: give the bare module, as it was before the first wrap, or leave out the second "
        "(TrainState and nnx.Optimizer take rules as precision=Precision(rules))."
    )
