"""Which operations round nothing, given operands that are half: those that move numbers, or pick one of them.

`_EXACT` says it of the values; `_EXACT_BACKWARD` of the cotangents of operands.
"""

from typing import Any

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.jaxpr.op_table import Trait, having

_PICKS = frozenset(
    (
        *("abs", "neg", "sign", "max", "min", "clamp", "select_n", "floor", "ceil", "round", "stop_gradient"),
        *("cummax", "cummin", "reduce_max", "reduce_min", "reduce_window_max", "argmax", "argmin", "sort"),
        *(
            "concatenate",
            "stack",
            "dynamic_slice",
            "dynamic_update_slice",
            "gather",
            "pad",
            "scatter",
            "iota",
        ),
        *("all_gather", "all_to_all", "ppermute", "pmax", "pmin", "top_k", "select_and_gather_add"),
    )
)
_EXACT = having(Trait.MOVES) | having(Trait.VIEW) | _PICKS

#: Their transposes are exact: of a sum the copies of its cotangent, of a selection parts of it and zeros.
_EXACT_BACKWARD = frozenset(
    (
        *("add", "sub", "neg", "add_any", "reduce_sum", "cumsum", "max", "min", "clamp", "select_n", "abs"),
        *("reduce_max", "reduce_min", "reduce_window_max", "concatenate", "stack", "slice", "dynamic_slice"),
        *("reshape", "transpose", "squeeze", "expand_dims", "rev", "copy", "copy_p", "name", "pad", "split"),
        *("unstack", "stop_gradient", "sharding_constraint", "optimization_barrier", "device_put", "reshard"),
        *("eq", "ne", "lt", "le", "gt", "ge", "is_finite", "sign", "floor", "ceil", "round", "argmax"),
        # Sums of cotangents, which are looked at on their own.
        *("broadcast_in_dim", "gather"),
    )
)


def keeps_values(eqn: Any) -> bool:
    """Returns whether an operation's results are exact, if its half operands are."""
    if eqn.primitive.name == "convert_element_type":
        return is_half(ir.dtype_of(eqn.invars[0]))
    return eqn.primitive.name in _EXACT


def rounds_cotangents(eqn: Any) -> bool:
    """Returns whether an operation rounds the cotangents that it gives its operands."""
    return eqn.primitive.name not in _EXACT_BACKWARD
