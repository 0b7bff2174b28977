"""The rules of quotients and integer powers, which leave float16's range where an operand is small.

In float16 `1 / h` is infinite below 1.6e-5, `h ** -2` below 3.9e-3, and the derivative of `g / h` has the
factor `h ** -2`. bfloat16 has float32's range, so that they follow their operands there. PyTorch keeps
reciprocals, powers (squares, too) and `1 / h` in float32 for either half dtype.
"""

from collections.abc import Sequence
from typing import Any

from jmp_policy._src.autocast.operation_rules import Promote, as_planned, as_traced, inside_float32
from jmp_policy._src.autocast.planner import Demand, EqnPlan, Planner, Rule, Value
from jmp_policy._src.autocast.runtime import rebound
from jmp_policy._src.autocast.values import CastCache
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.policy.regions import Region


def _is_narrow(region: Region) -> bool:
    """Returns whether operations are to stay within float16's range by themselves."""
    return region.half is not None and region.half.name == "float16" and not region.lower


class IntegerPower(Promote):
    """A power: in float16 only squares are computed in half."""

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        return [True] if self._is_full(eqn, region) else super().demand(planner, eqn, outs, region)

    @staticmethod
    def _is_full(eqn: Any, region: Region) -> bool:
        return _is_narrow(region) and not 0 <= eqn.params["y"] <= 2

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if self._is_full(eqn, region):
            return as_traced(self, eqn, "full: exceeds float16 easily")
        return super().plan(planner, eqn, ins, outs, region)


class Quotient(Promote):
    """A quotient or remainder: in float16 only one by a number is computed in half.

    Of a number, or of a parameter, it is float32. Of two half values it is computed in float32 and returned
    in half: the quotient is within range more often than the factors of its derivative.
    """

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        if _is_narrow(region) and isinstance(eqn.invars[0], compat.Literal):
            return [True, True]
        return super().demand(planner, eqn, outs, region)

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        step = super().plan(planner, eqn, ins, outs, region)
        numerator, divisor = ins
        is_half = ir.is_float32(eqn.outvars[0]) and step.outs[0].dtype == region.half
        if not is_half or not _is_narrow(region) or divisor.source == "constant":
            return step
        if numerator.source != "computed":
            return as_traced(self, eqn, "full: a quotient of a number exceeds float16 easily")
        return inside_float32(self, eqn, region.half, "its derivative exceeds float16 easily")

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        if not step.why.startswith("inside"):
            return super().run(step, caches)
        return as_planned(step, rebound(step.eqn, step.reads, caches))


#: By primitive's name.
RULES: dict[str, Rule] = {"integer_pow": IntegerPower(), "div": Quotient(), "rem": Quotient()}
