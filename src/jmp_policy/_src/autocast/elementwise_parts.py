"""Finds the elementwise parts of a planned program that compute in float32 between half values.

    h = x @ w                 # half
    t = tanh(h ** 3 + h)      # float32: its derivative would keep float32 arrays
    y = (t * h) @ v           # the product reads half

Grown from its result, a part takes in what makes its operands, as long as nobody else reads that, until all
its large operands are half. Those are then all that its derivative has to keep (`joined_parts`).
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_policy._src.autocast.elementwise import is_broadcast, is_constant, is_elementwise, is_smaller
from jmp_policy._src.autocast.planner import EqnPlan, Plan
from jmp_policy._src.autocast.uses import Uses, is_half
from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.jaxpr import compat, ir, op_lists
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.jaxpr.op_table import Trait, having

_NONLINEAR = having(Trait.NONLINEAR)


class Part(NamedTuple):
    """Equations with one result, of which one function is made.

    Args:
      places: of the equations in their program.
      inputs: variables that others make.
      out: the variable that others read.
      half: dtype of the result.
      is_softmax: whether it is exponentials over their sum, and not elementwise.
    """

    places: tuple[int, ...]
    inputs: tuple[Any, ...]
    out: Any
    half: np.dtype
    is_softmax: bool = False


def elementwise_parts(uses: Uses, taken: set[int]) -> Iterator[Part]:
    """Yields the parts of a program; `taken` are places of equations that belong to others."""
    taken = set(taken)
    for place in reversed(range(len(uses.eqns))):
        part = None if place in taken else _part(uses, place, taken)
        if part is not None:
            taken.update(p for p in part.places if not is_constant(uses.eqns[p]))
            yield part


def _part(uses: Uses, last: int, taken: set[int]) -> Part | None:
    """Returns the part whose result the equation in a place makes."""
    out = uses.eqns[last].outvars[0] if uses.eqns[last].outvars else None
    if out is None or not _may_end(uses, last):
        return None
    half = uses.held(out) if is_half(uses.held(out)) else uses.half_of_all(out)
    if half is None:
        return None
    places, inputs = _grown(uses, last, taken)
    if not all(_is_input(uses, var) for var in inputs) or not _is_worth_it(uses, places, inputs, out):
        return None
    return Part(tuple(sorted(places)), tuple(inputs), out, half)


def _may_end(uses: Uses, place: int) -> bool:
    eqn, step = uses.eqns[place], uses.steps[place]
    out = eqn.outvars[0]
    sizes = ir.shape_of(out) if ir.is_float32(out) else ()
    # Of a number nothing is to be saved.
    is_sized = bool(sizes) and ir.has_known_sizes(sizes)
    return is_sized and is_elementwise(eqn, sizes) and not _is_asked_half(step)


def _grown(uses: Uses, last: int, taken: set[int]) -> tuple[set[int], list[Any]]:
    """Returns the places of a part that ends in one, and its inputs."""
    shape = ir.shape_of(uses.eqns[last].outvars[0])
    places, inputs = {last}, []
    #: Place -> what it makes that the part reads. The last one is looked at first: all its readers have been.
    operands: dict[int, list[Any]] = {}
    waiting: list[int] = []

    def add(atoms: Sequence[Any]) -> None:
        for atom in dict.fromkeys(a for a in atoms if not isinstance(a, compat.Literal)):
            place = uses.made_at.get(atom)
            known = inputs if place is None else operands.setdefault(place, [])
            if place is not None and not known:
                heapq.heappush(waiting, -place)
            if atom not in known:
                known.append(atom)

    add(uses.eqns[last].invars)
    while waiting:
        place = -heapq.heappop(waiting)
        if place not in taken and _is_taken_in(uses, place, places, shape):
            places.add(place)
            add(uses.eqns[place].invars)
        else:
            inputs += operands[place]
    return places, inputs


def _is_taken_in(uses: Uses, place: int, places: set[int], shape: Any) -> bool:
    """Returns whether a part takes in an equation that makes an operand of it."""
    eqn, step = uses.eqns[place], uses.steps[place]
    if is_constant(eqn):
        return True
    if _is_asked_half(step) or not uses.read_within(eqn.outvars[0], places):
        return False
    if is_broadcast(eqn):
        return ir.shape_of(eqn.outvars[0]) == shape
    if not is_elementwise(eqn, shape):
        return False
    whole = {a for a in eqn.invars if not isinstance(a, compat.Literal) and ir.shape_of(a) == shape}
    # What is half anyway only if that leaves as many operands to keep.
    return not is_half(uses.held(eqn.outvars[0])) or len(whole) == 1


def _is_asked_half(step: EqnPlan) -> bool:
    """Returns whether the caller wants an elementwise operation in half."""
    return step.region.lower or step.why.startswith("lower")


def _is_input(uses: Uses, var: Any) -> bool:
    """Returns whether an operand of a part is an array that is half or float32, or has no derivative."""
    dtype = uses.held(var)
    return ir.is_plain_array(var) and (is_half(dtype) or dtype == FLOAT32 or dtype.kind in "biu")


def _is_worth_it(uses: Uses, places: set[int], inputs: Sequence[Any], out: Any) -> bool:
    """Returns whether a part's operands are less than what its equations would keep, of that some float32."""
    kept: dict[Any, np.dtype] = {}
    for place in places:
        kept |= _kept(uses.eqns[place], uses.steps[place])
    operands = [var for var in inputs if is_floating(uses.held(var)) and not is_smaller(var, out)]
    least = sum(uses.held(var).itemsize for var in operands)
    return FLOAT32 in kept.values() and least < sum(dtype.itemsize for dtype in kept.values())


def _kept(eqn: Any, step: EqnPlan) -> dict[Any, np.dtype]:
    """Returns the variables that the derivative of an equation needs, with the dtypes they are read in."""
    if step.inner:
        inside = [pair for plan in step.inner for pair in _equations(plan)]
        return {var: dtype for pair in inside for var, dtype in _kept(*pair).items()}
    if eqn.primitive.name not in _NONLINEAR:
        return {}
    read = {
        atom: dtype
        for atom, dtype in zip(eqn.invars, step.reads, strict=True)
        if dtype is not None and not isinstance(atom, compat.Literal)
    }
    if eqn.primitive.name not in op_lists.BROADCASTING:
        # Of the operand or the result one is enough.
        return dict.fromkeys(eqn.outvars, next(iter(read.values()))) if read else {}
    return {} if len(read) < 2 else {a: d for a, d in read.items() if not is_smaller(a, eqn.outvars[0])}


def _equations(plan: Plan) -> Iterator[tuple[Any, EqnPlan]]:
    yield from zip(compat.open_jaxpr(plan.jaxpr).eqns, plan.steps, strict=True)
