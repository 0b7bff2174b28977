"""Op-level mixed precision for any JAX function: trace it, plan it, run the plan."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from jmp_policy._src.autocast import call_rules, operation_rules, parts
from jmp_policy._src.autocast.planner import Plan, Planner, Rule, traced
from jmp_policy._src.core.classes import check_no_nnx_module, is_instance_of, is_nnx_object
from jmp_policy._src.core.dtype_words import parse_dtype
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.core.types import DTypeLike
from jmp_policy._src.jaxpr import calls, compat, ir
from jmp_policy._src.jaxpr.ir import Flat, flattened
from jmp_policy._src.jaxpr.op_table import LISTED, OpList
from jmp_policy._src.policy.frameworks import imported_frameworks
from jmp_policy._src.policy.marked_regions import Regions, compute_dtype
from jmp_policy._src.policy.patterns import unused_error
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import check_has_no_state, is_recipe
from jmp_policy._src.policy.regions import as_rules, rules_of
from jmp_policy._src.policy.rules import PolicyLike, PolicyMap, any_wants_fp32_weight_grads, as_policy_map
from jmp_policy._src.policy.scope import in_trial
from jmp_policy._src.products import binding

F = TypeVar("F", bound=Callable[..., Any])

#: The rules of operations that hold others, by name; a `lax.platform_dependent` is a `cond`.
_CALLS: dict[str, Rule] = {name: call_rules.RULES[kind] for name, kind in calls.KINDS.items()}

#: Reason of an entry that the caller has made.
_ASKED = "as the caller asked"


class Settings:
    """What `autocast` and `explain` were told, checked when they are called.

    Args:
      policy, rules, ops, lower, full, follow: as for `autocast`.
      marked_by: rules by which the modules of the function mark their operations already.
    """

    def __init__(
        self,
        policy: "PolicyMap | PolicyLike | DTypeLike | None" = None,
        rules: Any = (),
        ops: Mapping[str, OpList] | None = None,
        lower: Iterable[str] = (),
        full: Iterable[str] = (),
        follow: Iterable[str] = (),
        marked_by: PolicyMap | None = None,
    ):
        recipe, lower = taken_recipe(lower)
        self.rules = as_rules(rules) if rules else []
        self._marked_by, self._is_trial = marked_by, False
        self._follow(autocast_policy(policy, recipe), policy)
        self.table = _changed_table(ops, lower=lower, full=full, follow=follow)
        self._names = {name for name, (_, why) in self.table.items() if why == _ASKED}
        for name in self._names & _CALLS.keys():
            raise ValueError(
                f"A {name} holds other operations, and what they are decides. Put those on a list, mark the "
                "code with `region`, or autocast the functions that it calls."
            )
        self._warned: set[str] = set()

    def _follow(self, policy_map: PolicyMap, given: Any) -> None:
        self.policy_map, default = policy_map, policy_map.default
        self.half, self.recipe = compute_dtype(default.compute_dtype, given), default.recipe
        self.map_rules = rules_of(policy_map) if policy_map.overrides else []

    def in_trial(self) -> "Settings":
        """What to follow where a report tries other rules; these settings where none does."""
        own = self.policy_map if self._marked_by is None else self._marked_by
        tried = in_trial(own)
        if tried is own:
            return self
        other = copy.copy(self)
        other._is_trial = True
        other.rules = self.rules if tried.overrides or is_half(tried.default.compute_dtype) else []
        other._follow(tried if self._marked_by is None else PolicyMap(tried.default), tried)
        return other

    def trace(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Plan, Flat]:
        """Traces a function for arguments like these, and plans it.

        Raises:
          ValueError: for rules that match no scope.
          TypeError: for NNX modules among the arguments.
        """
        check_no_nnx_module("autocast", args, kwargs)
        with contextlib.ExitStack() as stack, _refusals_explained():
            # Flax modules that are called say which policy of the `PolicyMap` governs them.
            frameworks = imported_frameworks() if self.policy_map.overrides else ()
            seen = [stack.enter_context(framework.marking(self.policy_map)) for framework in frameworks]
            flat = flattened(functools.partial(_of_autocast, fn), args, kwargs)
        regions = Regions(self.half, self.rules, self.map_rules, self.recipe)
        planner = Planner(regions, self._planner_rules(), self.table, operation_rules.AS_TRACED, parts.join)
        opened = compat.open_jaxpr(flat.jaxpr)
        leaves = [traced(var, "leaf") for var in opened.invars]
        plan = planner.plan(flat.jaxpr, leaves, [True] * len(opened.outvars), regions.outermost)
        self._check(planner, next(filter(None, seen), None), getattr(fn, "__name__", repr(fn)))
        return plan, flat

    def _planner_rules(self) -> dict[str, Rule]:
        wants_float32 = any_wants_fp32_weight_grads(self.policy_map)
        lower = operation_rules.Lower(self.policy_map.keep_small_inputs, wants_float32)
        lists = {**operation_rules.LISTS, "lower": lower}
        by_list = {name: lists[op_list] for name, (op_list, _) in self.table.items()}
        # A name that the caller has put on a list is treated as the list says, moves and casts too.
        own = {n: rule for n, rule in operation_rules.OWN.items() if n not in self._names}
        return {**by_list, **own, **_CALLS}

    def _check(self, planner: Planner, seen: Any, name: str) -> None:
        regions = planner.regions
        unused = [glob for glob, _ in self.rules if glob not in regions.matched]
        by_module = set() if seen is None else seen.matched
        unused += [
            pattern
            for index, (pattern, _) in enumerate(self.policy_map.overrides)
            if index not in by_module and pattern not in regions.matched
        ]
        if unused and not self._is_trial:
            paths = regions.paths | (set() if seen is None else seen.paths)
            raise unused_error(unused, f"the function {name}, as autocast sees it", paths)
        texts = [f"{note} ({line})" if line else note for note, line in planner.notes.items()]
        known = {*LISTED, *planner.met}
        for unknown in self._names - known:
            hint = did_you_mean(unknown, known)
            texts.append(f"no operation met so far has the name {unknown!r}.{hint}")
        for text in texts:
            if text not in self._warned:
                self._warned.add(text)
                warnings.warn(f"autocast of {name}: {text}", stacklevel=4)


def _of_autocast(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Its frame is kept with each operation, and read by `source_lines.is_of_autocast`.
    return fn(*args, **kwargs)


@contextlib.contextmanager
def _refusals_explained() -> Iterator[None]:
    """Says what to do where cuDNN's attention, which takes half operands alone, cannot be traced.

    And where Flax refuses to change the state of an NNX module that the function closes over.
    """
    try:
        yield
    except NotImplementedError as error:
        # It may also refuse half operands: of a size, of a version.
        if not compat.is_raised_by_cudnn(error) or "float32" not in str(error):
            raise
        raise TypeError(
            f"cuDNN's attention does not take these operands: {error}. It is traced before autocast lowers "
            "anything, with float32 operands. Hand it half ones (`query.astype('bfloat16')`, and so key and "
            "value), or use jmp_policy.wrap for a Flax model."
        ) from error
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                "jmp_policy.autocast traces the function. Make the module an argument of it: "
                "jmp_policy.nnx.autocast(lambda model, x: model(x), 'float16')(model, x)."
            )
        raise


def taken_recipe(lower: Any) -> tuple[str | None, tuple[Any, ...]]:
    """Returns the float8 recipe among what is to be lowered, None without one, and the rest."""
    names = (lower,) if isinstance(lower, str) else tuple(lower)
    recipes = [name for name in names if is_recipe(name)]
    if len(recipes) > 1:
        raise ValueError(f"autocast follows one recipe, and lower={lower!r} names {len(recipes)} of them.")
    return (recipes or [None])[0], tuple(name for name in names if not is_recipe(name))


def autocast_policy(policy: Any, recipe: str | None = None) -> PolicyMap:
    """Returns the `PolicyMap` of what `autocast` takes: a dtype too, and none with a recipe.

    Raises:
      TypeError, ValueError: for what is neither a policy nor a dtype, and where neither is given.
    """
    if policy is None and recipe is None:
        raise TypeError(
            "autocast needs a policy or a half dtype, such as 'bfloat16', or lower='fp8_current'."
        )
    if policy is None:
        policy = "mixed_bfloat16"
    if not (isinstance(policy, PolicyMap | Policy | str) or hasattr(policy, "policy")):
        policy = f"params=float32,compute={parse_dtype(policy, 'of autocast').name},output=float32"
    policy_map = as_policy_map(policy)
    policy_map = policy_map if recipe is None else policy_map.with_recipe(recipe)
    if policy_map.default.recipe:
        check_has_no_state(policy_map.default.recipe, "autocast")
    return policy_map


def autocast(
    fn: F,
    policy: "PolicyMap | PolicyLike | DTypeLike | None" = None,
    *,
    rules: Any = (),
    lower: Iterable[str] = (),
    full: Iterable[str] = (),
    follow: Iterable[str] = (),
    ops: Mapping[str, OpList] | None = None,
) -> F:
    """Returns a function whose operations each run in the precision that suits them.

    Matrix products and convolutions take half operands, exponentials, logarithms and sums stay in float32,
    the rest follows. The function and its model stay as they are: what they do is traced, and only the
    float32 operations of that trace are changed. Gradients come out in the arguments' dtypes, so it stands
    where `wrap` stands: under `jax.jit`, inside `scaled_value_and_grad`.

    Args:
      fn: a function of pytrees that `jax.jit` could trace. Arguments that are no arrays are static.
      policy: a half dtype ("float16"), a policy or its text, of which the compute dtype counts; or a
        `PolicyMap`, whose rules hold for Flax modules as they do in `wrap`, and for named scopes
        elsewhere. It may be left out with a recipe in `lower`: then "mixed_bfloat16".
      rules: pairs of a path glob and `"off"`, `"lower"`, a half dtype or a policy. A glob such as
        `"*head*"` or `"decoder/layer_*"` is matched against the names of the scopes around an operation
        (Flax's and Haiku's modules are such scopes), and governs what is inside.
      lower, full, follow: names of primitives to put on that list: operands to half; float32; the widest
        operand's dtype. Others of `jmp_policy.explain`'s table stay. `lower="fp8_current"`, the name of a
        float8 recipe, computes products of weights in float8, as the same recipe in a policy does.
      ops: the same as a mapping from names to lists; also "inside": in float32, returned in half.

    Returns:
      A function with the same signature, output structure and output dtypes.

    Raises:
      TypeError, ValueError: for something that is no function, policy, rule or list, when it is made; when it
        is called, for rules that match nothing and for NNX modules among its arguments.

    Warns:
      UserWarning: once, for products that stay in float32 against expectation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def loss(w, x):
      ...     return jax.nn.logsumexp(x @ w)
      >>> half = autocast(loss, "float16")
      >>> w, x = jnp.ones((8, 2)), jnp.ones((3, 8))
      >>> half(w, x).dtype, jax.grad(half)(w, x).dtype
      (dtype('float32'), dtype('float32'))
      >>> "f16[8,2]" in str(jax.make_jaxpr(half)(w, x))
      True
    """
    check_function(fn, "autocast")
    return lowered(fn, Settings(policy, rules, ops, lower, full, follow))


def lowered(fn: F, settings: Settings) -> F:
    """What `autocast` returns, for settings."""

    @functools.wraps(fn)
    def in_half(*args: Any, **kwargs: Any) -> Any:
        current = settings.in_trial()
        plan, flat = current.trace(fn, args, kwargs)
        atoms = compat.open_jaxpr(plan.jaxpr).outvars
        dtypes = [ir.FLOAT32 if ir.is_float32(atom) else None for atom in atoms]
        outs = binding.run_program(plan.jaxpr, flat.arrays, lambda *arrays: plan.results(arrays, dtypes))
        return flat.rebuild(outs)

    return in_half  # type: ignore[return-value]


def _changed_table(
    ops: Mapping[str, OpList] | None = None,
    **lists: Iterable[str] | str,
) -> Mapping[str, tuple[OpList, str]]:
    """Returns the table with the user's changes.

    Args:
      ops: primitive's name -> list.
      lists: `lower=`, `full=`, `follow=`: names of primitives to put on that list.

    Raises:
      ValueError: for a list that there is not, for a name on two lists, and for a name that is empty.
      TypeError: for something that is no name, such as a function.
    """
    changes: dict[str, Any] = {}
    given = [*dict(ops or {}).items()]
    for op_list, names in lists.items():
        given += [(name, op_list) for name in ([names] if isinstance(names, str) else names)]
    for name, op_list in given:
        if not isinstance(name, str):
            raise TypeError(
                "The op lists of autocast hold names of primitives, as a jaxpr shows them ('dot_general'); "
                f"got {name!r} of type {type(name).__name__}."
            )
        if op_list not in get_args(OpList):
            raise ValueError(
                f"Unknown op list {op_list!r} for {name!r}. Known: {', '.join(get_args(OpList))}."
            )
        if changes.setdefault(name, op_list) != op_list:
            raise ValueError(
                f"The primitive {name!r} is on two lists, {changes[name]!r} and {op_list!r}; leave one."
            )
    return {**LISTED, **{name: (op_list, _ASKED) for name, op_list in changes.items()}}


def check_function(fn: Any, name: str) -> None:
    """Raises for what is no function, and for Flax modules, which keep more than a function does."""
    is_nnx, is_linen = is_nnx_object(fn), is_instance_of(fn, "flax.linen", "Module")
    if is_nnx or is_linen or not callable(fn):
        hint = " For an NNX module use jmp_policy.nnx.autocast." if is_nnx else ""
        hint = " Give it module.apply." if is_linen else hint
        if isinstance(fn, str | type | Policy | PolicyMap):
            hint = f" It transforms a function: half = jmp_policy.{name}(function, 'float16'). Inside of one,"
            hint += " `with jmp_policy.region('float16'):` marks code."
        raise TypeError(f"{name} takes a function of arrays, got {type(fn).__name__}.{hint}")
