"""Values in two runs of a program: as it was written, and in float32."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.float32_replay import as_traced, to_float32


class Twin(NamedTuple):
    """A value in both runs. As a pytree: `half` and `exact` where they may differ, else one of them.

    Args:
      half: as the program computes it, in the dtype that it was traced in; float32 where both are one.
      exact: in float32; the very same object where the two cannot differ.
      node: number of the node that it is; None where the two cannot differ.
      wide: what float32 gives for the half values that enter its region; None where it is in none.
      region: module, line and direction of the operations that are measured as one.
      lost: what rounding to float8 lost in its region, as `lost_in_float8` counts it; None without float8.
    """

    half: Any
    exact: Any
    node: int | None = None
    wide: Any = None
    region: Any = None
    lost: Any = None


def _flatten(twin: Twin) -> tuple[tuple[Any, ...], int | None]:
    return ((twin.exact,) if twin.node is None else (twin.half, twin.exact)), twin.node


jax.tree_util.register_pytree_node(Twin, _flatten, lambda node, arrays: Twin(arrays[0], arrays[-1], node))


def same(value: Any) -> Twin:
    """The twin of a value that both runs share; float32 where it is half."""
    value = to_float32(value)
    return Twin(value, value)


def held(value: Any, var: Any) -> Any:
    """A value in the half dtype that its variable was traced in: it has no more digits."""
    dtype = ir.dtype_of(var)
    return lax.convert_element_type(value, dtype) if is_half(dtype) else value


def as_written(eqn: Any, twins: Sequence[Twin]) -> list[Any]:
    """What an equation gives in the run as the program is written; float32 where it is half."""
    with compat.eqn_context(eqn):
        return as_traced(eqn, [twin.half for twin in twins])
