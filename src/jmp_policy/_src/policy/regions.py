"""Marks parts of a program for the `autocast` around them, and reads rules for parts by their names."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax

from jmp_policy._src.core.dtype_words import parse_dtype
from jmp_policy._src.core.types import DTypeLike
from jmp_policy._src.policy.marked_regions import compute_dtype
from jmp_policy._src.policy.patterns import checked_pairs
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import check_has_no_state
from jmp_policy._src.policy.rules import PolicyMap

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def region(precision: "str | Policy | DTypeLike") -> Iterator[None]:
    """Marks the operations of a with-block for the `autocast` around it; also inside a module's method.

    The innermost marker wins. Outside of `autocast` it only names the operations in profiles.

    Args:
      precision: `"off"`: every operation runs as traced, with its half operands cast to float32; `"lower"`:
        every listed operation runs in half precision, those that autocast would keep in float32 included
        (constants that do not fit into half excepted); or a half dtype or policy, which replaces the one
        given to `autocast`.

    Raises:
      ValueError: for an unknown word or dtype.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def head(x, w):
      ...     with region("off"):
      ...         return x @ w
      >>> head(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype
      dtype('float32')
    """
    with jax.named_scope(f"autocast[{_region_word(precision)}]"):
        yield


def full_precision(fn: Callable[P, T]) -> Callable[P, T]:
    """Makes `autocast` leave the operations of a function as traced: `region("off")` as a decorator.

    Args:
      fn: any function, also a method of a module.

    Raises:
      TypeError: for something that is not a function.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import explain
      >>> @full_precision
      ... def head(x, w):
      ...     return x @ w
      >>> explain(head, "float16")(jnp.ones((2, 2)), jnp.ones((2, 2)))[0].operands
      'float32'
    """
    if not callable(fn):
        raise TypeError(f"full_precision decorates a function; got {fn!r}. For a block use region('off').")

    @functools.wraps(fn)
    def in_full(*args: P.args, **kwargs: P.kwargs) -> T:
        with region("off"):
            return fn(*args, **kwargs)

    return in_full


def _region_word(given: "str | Policy | DTypeLike") -> str:
    precision: Any = given.compute_dtype.name if isinstance(given, Policy) else given
    if precision in ("off", "lower"):
        return precision
    word = precision.removeprefix("mixed_") if isinstance(precision, str) else precision
    half = compute_dtype(
        parse_dtype(word, f"of region({precision!r}), which is neither 'off' nor 'lower'"), precision
    )
    recipe = given.recipe if isinstance(given, Policy) else None
    check_has_no_state(recipe, "autocast")
    return "off" if half is None else half.name if recipe is None else f"{half.name}:{recipe}"


def as_rules(rules: Any) -> list[tuple[str, str]]:
    """Checks the argument `rules=` and returns it as pairs of a path glob and the word for a region.

    Raises:
      TypeError, ValueError: for something that is not a pair, glob or region; the message names it.
    """
    pairs: list[tuple[Any, Any]] = checked_pairs(rules)
    for glob, _ in pairs:
        if not isinstance(glob, str) or not glob.strip("/"):
            raise TypeError(
                f"The rule for {glob!r} of autocast is no path glob: operations are known by the names of "
                "the scopes around them. Rules by class or predicate go into a PolicyMap, for Flax modules."
            )
    return [(glob, _region_word(precision)) for glob, precision in pairs]


def rules_of(policy_map: PolicyMap) -> list[tuple[str, str]]:
    """Returns the path rules of a `PolicyMap`, for functions whose scopes are not named by Flax modules."""
    return [(p, _region_word(policy)) for p, policy in policy_map.overrides if isinstance(p, str)]
