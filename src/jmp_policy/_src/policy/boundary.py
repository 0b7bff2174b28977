"""What leaves a module: results in the dtype its policy says, carries in the dtype they came in."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jmp_policy._src.core.cast import cast_leaf, is_floating_array, map_changed
from jmp_policy._src.policy.policy import Policy


def cast_outputs(
    out: Any,
    given: tuple[Any, ...],
    policy: Policy,
    *,
    policy_changes: bool,
    may_be_scanned: bool,
    alone: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """The result of a module's method as its caller is to see it.

    Args:
      out: what the method returned.
      given: the positional arguments as they came, before any cast.
      policy: the module's policy.
      policy_changes: whether the caller is under another policy, so that the output dtype applies. Inside,
        results are handed on in compute dtype.
      may_be_scanned: whether `lax.scan` may run the method, so that a returned carry must keep its dtype:
        the first of a pair.
      alone: whether the carry may be all that it returns.
      is_leaf: as for `jax.tree.flatten`: what is not to be looked into.
    """

    def cast(x: Any) -> Any:
        if policy_changes:
            return cast_leaf(x, policy.output_dtype)
        # Scalars stay: they cost nothing and are mostly losses, whose cotangent is the loss scale.
        return x if not is_floating_array(x) or np.ndim(x) == 0 else cast_leaf(x, policy.compute_dtype)

    if alone and given:
        kept = _in_dtypes_of(given[0], out, is_leaf)
        if kept is not None:
            return kept
    if not (may_be_scanned and isinstance(out, tuple) and len(out) == 2 and given):
        return map_changed(cast, out, is_leaf)
    kept = _in_dtypes_of(given[0], out[0], is_leaf)
    carry = map_changed(cast, out[0], is_leaf) if kept is None else kept
    rest = map_changed(cast, out[1], is_leaf)
    if carry is out[0] and rest is out[1]:
        return out
    return (carry, rest) if type(out) is tuple else jax.tree.unflatten(_children_def(out), (carry, rest))


def _children_def(pair: Any) -> Any:
    """The structure of a pair (a NamedTuple, say) whose two children count as leaves."""
    return jax.tree.structure(pair, is_leaf=lambda x: x is not pair)


def _in_dtypes_of(given: Any, carry: Any, is_leaf: Callable[[Any], bool] | None) -> Any:
    """A returned carry in the dtypes it was given in, as `lax.scan` demands; None if it is no carry.

    A method that returns a pair whose first part has the structure and shapes of its first argument is
    the body of a scan as far as types go; the method that makes its first carry knows no policy.
    """
    before, before_def = jax.tree.flatten(given, is_leaf)
    after, after_def = jax.tree.flatten(carry, is_leaf)
    if before_def != after_def or not any(map(is_floating_array, before)):
        return None
    if any(getattr(a, "shape", ()) != getattr(b, "shape", ()) for a, b in zip(before, after, strict=True)):
        return None
    leaves = iter(
        [cast_leaf(b, a.dtype) if is_floating_array(a) else b for a, b in zip(before, after, strict=True)]
    )
    return map_changed(lambda _: next(leaves), carry, is_leaf)
