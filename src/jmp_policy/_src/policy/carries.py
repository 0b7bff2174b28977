"""Casts of what the body of a loop returns: a carry keeps its dtypes, as `lax.scan` demands."""

from collections.abc import Callable
from typing import Any

import jax

from jmp_policy._src.core.dtypes import cast_leaf, is_floating_array, map_changed


def cast_with_carry(
    out: Any, given: Any, cast: Callable[[Any], Any], may_be_whole: bool, is_leaf: Any
) -> Any:
    """Casts what a method returned, which may be a pair of a carry and an output.

    Args:
      out: what it returned.
      given: its first argument, as it came.
      cast: what is done to all other arrays.
      may_be_whole: whether the carry may be all that was returned.
      is_leaf: as for `jax.tree.flatten`.
    """
    if may_be_whole and (kept := _in_dtypes_of(given, out, is_leaf)) is not None:
        return kept
    if not (isinstance(out, tuple) and len(out) == 2):
        return map_changed(cast, out, is_leaf)
    kept = _in_dtypes_of(given, out[0], is_leaf)
    carry = map_changed(cast, out[0], is_leaf) if kept is None else kept
    parts = iter((carry, map_changed(cast, out[1], is_leaf)))
    return map_changed(lambda _: next(parts), out, lambda x: x is not out)  # A NamedTuple stays one.


def _in_dtypes_of(given: Any, carry: Any, is_leaf: Callable[[Any], bool] | None) -> Any:
    """Casts a returned carry to the dtypes it was given in, as `lax.scan` demands; None if it is no carry.

    What has the structure and the shapes of the method's first argument counts as a carry. The method that
    makes the first carry (`initialize_carry`) knows no policy, so the dtypes of that first carry are kept.
    """
    before, before_def = jax.tree.flatten(given, is_leaf)
    after, after_def = jax.tree.flatten(carry, is_leaf)
    if before_def != after_def or not any(map(is_floating_array, before)):
        return None
    pairs = list(zip(before, after, strict=True))
    if any(getattr(a, "shape", ()) != getattr(b, "shape", ()) for a, b in pairs):
        return None
    leaves = iter(cast_leaf(b, a.dtype) if is_floating_array(a) else b for a, b in pairs)
    return map_changed(lambda _: next(leaves), carry, is_leaf)
