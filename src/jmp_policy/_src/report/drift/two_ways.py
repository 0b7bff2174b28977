"""Results of a branch or loop in which the two runs of a program may go different ways."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jmp_policy._src.jaxpr import ir
from jmp_policy._src.jaxpr.float32_replay import to_float32
from jmp_policy._src.jaxpr.walk import Site
from jmp_policy._src.report.drift.recorder import Node, Recorder
from jmp_policy._src.report.drift.twin import Twin, held, same


def result_of(
    recorder: Recorder,
    eqn: Any,
    i: int,
    site: Site,
    twin: Twin,
    sources: Sequence[int | None],
    apart: Any,
    note: str,
) -> Twin:
    """Returns a result of a branch or loop as a node, if the two runs may differ in it.

    It inherits what was computed inside where both runs went the same way. Where they did not, their whole
    difference is introduced here: what is inside cannot be compared.

    Args:
      recorder, eqn, i, site: where to note it, and which result of which operation it is.
      twin: its values in both runs.
      sources: the nodes that it may be; None for values that cannot differ.
      apart: whether the two runs went different ways; None if they cannot.
      note: what to say then.
    """
    inside = tuple(dict.fromkeys(node for node in sources if node is not None))
    if not inside and apart is None:
        return same(twin.exact)
    var = eqn.outvars[i]
    half = held(twin.half, var)
    dtype, name = ir.dtype_of(var), eqn.primitive.name
    node = Node(site, name, dtype, 1, inside, rounds=apart is not None, adds=True, note=note)
    number = recorder.add(node)
    wide = half if apart is None else jnp.where(apart, twin.exact, to_float32(half))
    recorder.measure(number, half, wide, twin.exact)
    return Twin(half, twin.exact, number)
