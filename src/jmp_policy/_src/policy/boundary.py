"""Casts what a module returns: outputs to the dtype of its policy, carries to the dtype they came in."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jmp_policy._src.core.cast import cast_leaf, is_floating_array, map_changed
from jmp_policy._src.policy.policy import Policy


def policy_changes(caller: Policy | None, policy: Policy) -> bool:
    """Returns whether what leaves a module is for code under another policy.

    A recipe is about products alone: policies that differ in nothing else have no boundary between them.

    Args:
      caller: the policy of the code that calls the module; None for code outside of every module.
      policy: the module's.
    """
    return caller is None or _dtypes(caller) != _dtypes(policy)


def _dtypes(policy: Policy) -> tuple[Any, ...]:
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.grad_dtype


def cast_outputs(
    out: Any,
    given: tuple[Any, ...],
    policy: Policy,
    *,
    policy_changes: bool,
    may_be_scanned: bool,
    may_return_carry_only: bool = False,
    kept_rank: int = 0,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Casts the outputs of a module's method for its caller.

    Args:
      out: what the method returned.
      given: the positional arguments as they came, before any cast.
      policy: the module's policy.
      policy_changes: whether the caller is under another policy, so that the output dtype applies. Between
        modules of one policy, outputs stay in compute dtype.
      may_be_scanned: whether `lax.scan` may run the method, so that a returned carry (the first of a pair)
        must keep its dtype.
      may_return_carry_only: whether the carry may be all that the method returns.
      kept_rank: the rank up to which outputs for code under the same policy keep their dtype.
      is_leaf: as for `jax.tree.flatten`.
    """

    def cast(x: Any) -> Any:
        if policy_changes:
            return cast_leaf(x, policy.output_dtype)
        # Scalars keep their dtype: they cost nothing and are mostly losses, whose cotangent is the scale.
        return (
            x if not is_floating_array(x) or np.ndim(x) <= kept_rank else cast_leaf(x, policy.compute_dtype)
        )

    if may_return_carry_only and given:
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
    """Returns the tree structure of a pair (such as a NamedTuple) whose two children count as leaves."""
    return jax.tree.structure(pair, is_leaf=lambda x: x is not pair)


def _in_dtypes_of(given: Any, carry: Any, is_leaf: Callable[[Any], bool] | None) -> Any:
    """Casts a returned carry to the dtypes it was given in, as `lax.scan` demands; None if it is no carry.

    What has the structure and the shapes of the method's first argument counts as a carry. The method that
    makes the first carry (`initialize_carry`) knows no policy, so the dtypes of that first carry are kept.
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
