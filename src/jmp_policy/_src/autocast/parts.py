"""Joins equations of a plan into parts that run as one: those of softmaxes, and elementwise ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jmp_policy._src.autocast.elementwise_parts import elementwise_parts
from jmp_policy._src.autocast.joined_parts import joined_step
from jmp_policy._src.autocast.planner import Plan, Program, as_program
from jmp_policy._src.autocast.softmax_parts import softmax_parts
from jmp_policy._src.autocast.uses import Uses, is_half


def join(plan: Plan) -> Program | Mapping[Any, np.dtype]:
    """Returns the program of a plan, with its parts joined; or first, which values have to be half for that.

    Those are results of parts that are held in float32 and read in half: what moves them is to be planned so.
    """
    uses = Uses(plan)
    softmaxes = list(softmax_parts(uses))
    taken = {place for part in softmaxes for place in part.places}
    parts = [*softmaxes, *elementwise_parts(uses, taken)]
    narrowed = {part.out: part.half for part in parts if not is_half(uses.held(part.out))}
    if narrowed:
        return narrowed
    joined = {part.places[-1]: joined_step(uses, part) for part in parts}
    inside = {place for part in parts for place in part.places}
    read = {var for part in parts for var in part.inputs}
    # A part has its own copy of what is made of numbers alone, which others may read as well.
    alone = {place for place in inside - joined.keys() if read & set(uses.eqns[place].outvars)}
    alone |= {p for p in inside - joined.keys() if not uses.read_within(uses.eqns[p].outvars[0], inside)}
    places = [p for p in range(len(uses.eqns)) if p in joined or p in alone or p not in inside]
    steps = [joined.get(place, uses.steps[place]) for place in places]
    eqns = [joined[place].eqn if place in joined else uses.eqns[place] for place in places]
    return as_program(plan.jaxpr, eqns, steps)
