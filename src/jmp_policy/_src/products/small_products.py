"""Says which matrix products gain nothing from half precision: those that sum few terms, or none."""

import math
from typing import Any

from jmp_policy._src.jaxpr import op_table
from jmp_policy._src.policy.module_precision import LEAST_TERMS


def gains_nothing(eqn: Any) -> bool:
    """Whether an operation is a product of too few terms to be faster in half precision.

    Features of which a layer has so few are times, coordinates and noise levels, which half would round.
    """
    if eqn.primitive.name not in op_table.LOWERED:
        return False
    terms = terms_of(eqn)
    # A size that is known only when an exported program is called may be any.
    return isinstance(terms, int) and terms < LEAST_TERMS


def terms_of(eqn: Any) -> int:
    """How many terms each element of a product sums; 1 for a product that sums nothing."""
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    if eqn.primitive.name == "conv_general_dilated":
        out_channels = eqn.params["dimension_numbers"].rhs_spec[0]
        return math.prod(size for axis, size in enumerate(rhs) if axis != out_channels)
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    (contract, _), _ = numbers
    return math.prod(lhs[i] for i in contract)
