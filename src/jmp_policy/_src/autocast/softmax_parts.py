"""Finds softmaxes in a planned program: exponentials in float32, over their sum, that are read in half."""

from collections.abc import Iterator
from typing import Any

from jmp_policy._src.autocast.elementwise_parts import Part
from jmp_policy._src.autocast.uses import Uses, is_half
from jmp_policy._src.jaxpr import compat, ir


def softmax_parts(uses: Uses) -> Iterator[Part]:
    """Yields softmaxes whose float32 exponentials would be kept beside the half weights."""
    for place, eqn in enumerate(uses.eqns):
        if eqn.primitive.name == "div" and ir.is_float32(eqn.outvars[0]):
            places = _softmax(uses, place)
            out = eqn.outvars[0]
            held = uses.held(out)
            half = held if is_half(held) else uses.half_of_all(out, through_elementwise=True)
            if places is not None and half is not None:
                yield Part(places, tuple(uses.eqns[places[0]].invars), out, half, is_softmax=True)


def _softmax(uses: Uses, place: int) -> tuple[int, ...] | None:
    """Returns the places of a softmax that ends in a quotient: exp, sum, how that is broadcast, quotient."""
    quotient = uses.eqns[place]
    chain = [place]
    made = _made_by(uses, quotient.invars[1])
    while made is not None and uses.eqns[made].primitive.name in ("broadcast_in_dim", "reshape"):
        chain.append(made)
        made = _made_by(uses, uses.eqns[made].invars[0])
    if made is None or uses.eqns[made].primitive.name != "reduce_sum":
        return None
    sums, numerator = uses.eqns[made], quotient.invars[0]
    first = _made_by(uses, numerator)
    places = (*([] if first is None else [first]), made, *reversed(chain))
    inside = [var for p in places[:-1] for var in uses.eqns[p].outvars]
    if (
        first is None
        or uses.eqns[first].primitive.name != "exp"
        or sums.invars[0] is not numerator
        or isinstance(uses.eqns[first].invars[0], compat.Literal)
        or not all(ir.is_float32(var) and uses.read_within(var, set(places)) for var in inside)
        or any(is_half(uses.held(var)) for var in inside)
        or not _is_along(sums, quotient)
    ):
        return None
    return places


def _made_by(uses: Uses, atom: Any) -> int | None:
    return None if isinstance(atom, compat.Literal) else uses.made_at.get(atom)


def _is_along(sums: Any, quotient: Any) -> bool:
    """Returns whether each exponential is divided by the sum that it is in: the summed axes have size 1."""
    axes, shape = sums.params["axes"], ir.shape_of(quotient.outvars[0])
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return ir.shape_of(quotient.invars[0]) == shape and ir.shape_of(quotient.invars[1]) == kept
