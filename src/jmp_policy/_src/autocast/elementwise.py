"""Tells which equations are elementwise, with what they may hold and be broadcast from."""

import math
from typing import Any

from jmp_policy._src.jaxpr import calls, compat, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.jaxpr.op_table import Trait, having

_ELEMENTWISE = having(Trait.ELEMENTWISE)

#: Operands with so many times fewer elements than the result may be float32: broadcast means, scales, biases.
_SMALLER = 8


def is_elementwise(eqn: Any, shape: Any) -> bool:
    """Returns whether an equation makes one array of this shape, element by element."""
    kind, name = calls.kind_of(eqn), eqn.primitive.name
    if kind is None and name not in _ELEMENTWISE and name != "convert_element_type":
        return False
    if len(eqn.outvars) != 1 or eqn.effects or not all(map(ir.is_plain_array, (*eqn.invars, *eqn.outvars))):
        return False
    out = eqn.outvars[0].aval
    if out.shape != shape or (out.dtype != FLOAT32 and out.dtype.kind not in "biu"):
        return False
    if kind is Kind.CUSTOM_JVP or (kind is Kind.JIT and calls.is_inlined(eqn)):
        called = calls.called(eqn)
        assert called is not None
        inner = compat.open_jaxpr(called.jaxpr)
        return not compat.constants(called.jaxpr) and all(map(_is_elementwise_inside, inner.eqns))
    if name == "convert_element_type":
        return eqn.params.get("sharding") is None
    return name in _ELEMENTWISE


def _is_elementwise_inside(eqn: Any) -> bool:
    """Returns whether an equation may be in a function that is elementwise; of scalars, too."""
    if len(eqn.outvars) != 1 or not ir.is_plain_array(eqn.outvars[0]):
        return False
    return is_constant(eqn) or is_broadcast(eqn) or is_elementwise(eqn, ir.shape_of(eqn.outvars[0]))


def is_constant(eqn: Any) -> bool:
    """Returns whether an equation makes an array of numbers that stand in the program."""
    if not eqn.invars or [a for a in eqn.invars if not isinstance(a, compat.Literal)]:
        return False
    return len(eqn.outvars) == 1 and not eqn.effects and not ir.holds_jaxpr(eqn)


def is_broadcast(eqn: Any) -> bool:
    """Returns whether an equation copies a small array to a larger shape."""
    return eqn.primitive.name == "broadcast_in_dim" and is_smaller(eqn.invars[0], eqn.outvars[0])


def is_smaller(atom: Any, out: Any) -> bool:
    """Returns whether an operand has so few elements that it counts for nothing beside the result."""
    if isinstance(atom, compat.Literal):
        return True
    small, large = ir.shape_of(atom), ir.shape_of(out)
    return ir.has_known_sizes((*small, *large)) and _SMALLER * math.prod(small) <= math.prod(large)
