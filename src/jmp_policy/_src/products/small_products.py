"""Says which matrix products gain nothing from half precision: those that sum few terms, or none."""

from typing import Any

from jmp_policy._src.jaxpr import op_table
from jmp_policy._src.jaxpr.matrix_products import terms_of
from jmp_policy._src.policy.module_precision import LEAST_TERMS


def gains_nothing(eqn: Any) -> bool:
    """Returns whether an operation is a product of too few terms to be faster in half precision.

    Features of which a layer has so few are times, coordinates and noise levels, which half would round.
    """
    if eqn.primitive.name not in op_table.LOWERED:
        return False
    terms = terms_of(eqn)
    # A size that is known only when an exported program is called may be any.
    return isinstance(terms, int) and terms < LEAST_TERMS


def few_terms_text(terms: int) -> str:
    """Returns why a product of so many terms is float32."""
    summed = f"it sums {terms} terms" if terms > 1 else "it sums nothing"
    return f"{summed}, and half precision gains from {LEAST_TERMS} on"
