"""Answers what a planned program does with its values: who makes them, who reads them, and in which dtype."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.autocast.elementwise import is_elementwise
from jmp_policy._src.autocast.operation_rules import is_summed
from jmp_policy._src.autocast.planner import Plan
from jmp_policy._src.jaxpr import calls, compat, ir, op_lists
from jmp_policy._src.jaxpr.calls import Kind


@functools.lru_cache(maxsize=256)
def is_half(dtype: Any) -> bool:
    """Returns whether a dtype is one of those that autocast lowers to."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


class Uses:
    """The equations of a plan, by the variables that they make and read.

    Args:
      plan: its equations and their steps.
    """

    def __init__(self, plan: Plan):
        opened = compat.open_jaxpr(plan.jaxpr)
        self.eqns, self.steps = opened.eqns, plan.steps
        #: Variable -> the place of the equation that makes it; -> the places that read it, with the operand.
        self.made_at: dict[Any, int] = {}
        self.read_at: dict[Any, list[tuple[int, int]]] = {}
        self._held: dict[Any, Any] = {}
        #: What `half_of_all` said; those of plans that are inlined, by place.
        self._halves: dict[Any, np.dtype | None] = {}
        self._inlined: dict[int, Uses] = {}
        for var, value in zip(opened.invars, plan.ins, strict=True):
            self._held[var] = value.dtype
        for place, (eqn, step) in enumerate(zip(self.eqns, self.steps, strict=True)):
            for operand, atom in enumerate(eqn.invars):
                if not isinstance(atom, compat.Literal):
                    self.read_at.setdefault(atom, []).append((place, operand))
            for var, value in zip(eqn.outvars, step.outs, strict=True):
                self.made_at[var], self._held[var] = place, value.dtype
        self.returned = {atom for atom in opened.outvars if not isinstance(atom, compat.Literal)}

    def held(self, var: Any) -> Any:
        """Returns the dtype in which a variable is held."""
        return self._held.get(var, ir.dtype_of(var))

    def read_within(self, var: Any, places: Any) -> bool:
        """Returns whether all who read a variable are in some places."""
        return var not in self.returned and all(place in places for place, _ in self.read_at.get(var, ()))

    def half_of_all(self, var: Any, through_elementwise: bool = False) -> np.dtype | None:
        """Returns the one half dtype in which everyone reads a variable, if there is one.

        Operations that only move it are looked through, and calls that are inlined.

        Args:
          var: the variable.
          through_elementwise: whether to look through operations in float32 whose results are rounded.
        """
        if var in self.returned or var not in self.read_at:
            return None
        key = var, through_elementwise
        if key not in self._halves:
            found = {self._half_read(*read, through_elementwise) for read in self.read_at[var]}
            self._halves[key] = found.pop() if len(found) == 1 else None
        return self._halves[key]

    def _half_read(self, place: int, operand: int, through_elementwise: bool) -> np.dtype | None:
        eqn, step = self.eqns[place], self.steps[place]
        name, kind = eqn.primitive.name, calls.kind_of(eqn)
        is_wide = through_elementwise and not is_half(step.reads[operand])
        if is_wide and is_elementwise(eqn, ir.shape_of(eqn.invars[operand])):
            return self.half_of_all(eqn.outvars[0], through_elementwise)
        if step.inner:
            if kind is not Kind.CALL and not (kind is Kind.JIT and calls.is_inlined(eqn)):
                return None
            if place not in self._inlined:
                self._inlined[place] = Uses(step.inner[0])
            inside = self._inlined[place]
            inner = compat.open_jaxpr(step.inner[0].jaxpr).invars
            return inside.half_of_all(inner[operand], through_elementwise)
        if name == "convert_element_type":
            to = eqn.params["new_dtype"]
            return to if is_half(to) else self.half_of_all(eqn.outvars[0]) if to == ir.FLOAT32 else None
        if step.reads[operand] is not None and is_half(step.reads[operand]):
            return step.reads[operand]
        if len(eqn.outvars) != 1 or not ir.is_float32(eqn.outvars[0]):
            return None
        moves = name in op_lists.MOVES and len(eqn.invars) == 1 and not is_summed(eqn)
        if moves:
            return self.half_of_all(eqn.outvars[0], through_elementwise)
        return None
