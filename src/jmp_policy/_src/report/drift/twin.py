"""Values in two runs of a program: as it was written, and in float32."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import lax

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.float32_replay import as_traced, to_float32
from jmp_policy._src.jaxpr.walk import Site


class Twin(NamedTuple):
    """A value in both runs.

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


#: Evaluates a jaxpr on twins, called at a site.
Run = Callable[[Any, Sequence[Twin], Site], list[Twin]]


def same(value: Any) -> Twin:
    """Returns the twin of a value that both runs share; float32 where it is half."""
    value = to_float32(value)
    return Twin(value, value)


def nodes_of(twins: Sequence[Twin]) -> tuple[list[bool], list[int | None]]:
    """Returns which twins may differ, and their nodes."""
    return [twin.node is not None for twin in twins], [twin.node for twin in twins]


def packed(twins: Sequence[Twin], differs: Sequence[bool]) -> list[Any]:
    """Returns the arrays of twins: one of each, or two where they may differ."""
    return [(t.half, t.exact) if two else t.exact for t, two in zip(twins, differs, strict=True)]


def unpacked(arrays: Sequence[Any], differs: Sequence[bool], nodes: Sequence[int | None]) -> list[Twin]:
    """Returns the twins of arrays that were packed, with their nodes."""
    return [
        Twin(pair[0], pair[1], node) if two else same(pair)
        for pair, two, node in zip(arrays, differs, nodes, strict=True)
    ]


def held(value: Any, var: Any) -> Any:
    """Returns a value in the half dtype that its variable was traced in: it has no more digits."""
    dtype = ir.dtype_of(var)
    return lax.convert_element_type(value, dtype) if is_half(dtype) else value


def as_written(eqn: Any, twins: Sequence[Twin]) -> list[Any]:
    """Returns what an equation gives in the run as the program is written; float32 where it is half."""
    with compat.eqn_context(eqn):
        return as_traced(eqn, [twin.half for twin in twins])
