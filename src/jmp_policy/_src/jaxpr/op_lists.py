"""Which list each primitive is on, and why.

Data only; `autocast.operation_rules` says what being on a list means.

Drawn from what PyTorch (`autocast_mode.h`) and TensorFlow (`auto_mixed_precision_lists.h`) agree on, by
names of JAX's primitives. What is not listed here runs in the dtypes it was traced in.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from jmp_policy._src.core.suggest import did_you_mean

#: lower: operands to half. full: float32. follow: as the widest operand. inside: in float32, and what comes
#: of half operands is handed on in half.
OpList: TypeAlias = Literal["lower", "full", "follow", "inside"]

_LOWER = {
    "dot_general": "Tensor Cores take half operands and accumulate in float32",
    "conv_general_dilated": "Tensor Cores take half operands and accumulate in float32",
    "ragged_dot_general": "a dot per group (mixture of experts)",
    "ragged_dot": "a dot per group (mixture of experts)",
}

_FULL = {
    "exp": "exceeds float16 above 11.1",
    "exp2": "exceeds float16 at 16",
    "expm1": "exceeds float16 above 11.1",
    "log": "half loses all digits near 1",
    "log2": "half loses all digits near 1",
    "log1p": "its small arguments are subnormal in float16",
    "pow": "exceeds float16 easily; the exponent's rounding is multiplied",
    "sqrt": "of variances, which are below float16's normal range",
    "rsqrt": "of variances, which are below float16's normal range",
    "cbrt": "as sqrt",
    "erf_inv": "steep near 1, where half has no digits",
    "erfc": "its tail is below float16's range",
    "lgamma": "exceeds float16, and cancels",
    "digamma": "cancels near its zero",
    "polygamma": "exceeds float16 near 0",
    "igamma": "a series with many terms",
    "igammac": "a series with many terms",
    "igamma_grad_a": "a series with many terms",
    "random_gamma_grad": "a series with many terms",
    "regularized_incomplete_beta": "a continued fraction with many terms",
    "bessel_i0e": "a series with many terms",
    "bessel_i1e": "a series with many terms",
    "sin": "of positions: half has no fraction left above 2048",
    "cos": "of positions: half has no fraction left above 2048",
    "tan": "as sin",
    "asin": "steep near 1",
    "acos": "steep near 1",
    "atan": "as the other inverse functions",
    "atan2": "a quotient that may exceed float16",
    "sinh": "exceeds float16 above 11.8",
    "cosh": "exceeds float16 above 11.8",
    "asinh": "a logarithm",
    "acosh": "a logarithm",
    "atanh": "a logarithm, steep near 1",
    "reduce_sum": "many terms: half stops growing at 2048 times a term",
    "reduce_prod": "many factors: leaves float16's range",
    "cumsum": "as reduce_sum",
    "cumprod": "as reduce_prod",
    "cumlogsumexp": "a logarithm of a sum",
    "reduce_window_sum": "as reduce_sum (average pooling)",
    "psum": "a sum over devices",
    "psum_invariant": "a sum over devices",
    "reduce_scatter": "a sum over devices",
    "unreduced_psum": "a sum over devices",
    "argmax": "a decision: ties that half would make",
    "argmin": "a decision: ties that half would make",
    "sort": "a decision: ties that half would make",
    "top_k": "a decision: ties that half would make",
}

#: In float16 only, above a power of two: bfloat16 has float32's range.
_FULL_POWERS = {"integer_pow": "exceeds float16 easily"}

_FOLLOW = {
    "add": "exact to half's rounding",
    "add_any": "a sum of two cotangents",
    "sub": "exact to half's rounding",
    "mul": "exact to half's rounding",
    "div": "exact to half's rounding",
    "neg": "exact",
    "sign": "exact",
    "abs": "exact",
    "max": "exact",
    "min": "exact",
    "clamp": "exact",
    "floor": "exact",
    "ceil": "exact",
    "round": "exact",
    "rem": "exact to half's rounding",
    "square": "a product; float16 overflows above 255, see look-ahead for sums of squares",
    "one_minus_square": "a product; the derivative of tanh",
    "integer_pow": "a product of few factors",
    "tanh": "bounded, and 1-Lipschitz",
    "logistic": "bounded, and 1/4-Lipschitz",
    "select_n": "picks a value",
    "eq": "a comparison",
    "ne": "a comparison",
    "lt": "a comparison",
    "le": "a comparison",
    "gt": "a comparison",
    "ge": "a comparison",
    "is_finite": "a comparison",
    "cummax": "exact",
    "cummin": "exact",
    "reduce_window_max": "exact (max pooling)",
    "reduce_window_min": "exact",
    "pmax": "exact",
    "pmin": "exact",
    "concatenate": "moves data",
    "stack": "moves data",
    "dynamic_update_slice": "moves data",
    "dynamic_slice": "moves data",
    "all_gather": "moves data",
    "all_gather_invariant": "moves data",
    "all_to_all": "moves data",
    "ppermute": "moves data",
    "pbroadcast": "moves data",
}

_INSIDE = {
    "gather": "an embedding: its gradient is a sum over tokens",
    "pad": "the gradient of what it pads with is a sum",
    "reduce_max": "its gradient is a sum over ties",
    "reduce_min": "its gradient is a sum over ties",
    "erf": "its derivative is an exponential",
}

#: Elementwise with several operands, of which one may be broadcast along axes of size 1, or be a scalar.
BROADCASTING = frozenset(
    [
        "add",
        "add_any",
        "sub",
        "mul",
        "div",
        "rem",
        "max",
        "min",
        "select_n",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ]
)

#: Moves whose transpose is a sum, over copies or devices: done in float32, before a parameter is cast.
SUMMED = frozenset(["broadcast_in_dim", "tile", "pvary", "pcast", "pbroadcast"])

#: Of one array, to one or several: transposes, reshapes and slices of a parameter still are the parameter.
MOVES = {
    "broadcast_in_dim": "moves data",
    "reshape": "moves data",
    "transpose": "moves data",
    "squeeze": "moves data",
    "expand_dims": "moves data",
    "rev": "moves data",
    "slice": "moves data",
    "split": "moves data",
    "unstack": "moves data",
    "tile": "moves data",
    "copy": "moves data",
    "copy_p": "moves data",
    "name": "names a residual for a remat policy",
    "stop_gradient": "identity",
    "sharding_constraint": "identity",
    "layout_constraint": "identity",
    "mesh_cast": "identity",
    "reshard": "identity",
    "pvary": "identity",
    "pcast": "identity",
    "device_put": "moves data, each operand for itself",
    "optimization_barrier": "identity, each operand for itself",
}

#: Primitive's name -> (list, reason).
TABLE: Mapping[str, tuple[OpList, str]] = {
    **{name: ("lower", why) for name, why in _LOWER.items()},
    **{name: ("full", why) for name, why in _FULL.items()},
    **{name: ("follow", why) for name, why in _FOLLOW.items()},
    **{name: ("follow", why) for name, why in MOVES.items()},
    **{name: ("inside", why) for name, why in _INSIDE.items()},
}


#: Reason of an entry that the caller has made.
ASKED = "as the caller asked"


def is_full_power(name: str, params: Mapping[str, object], half: str) -> bool:
    """Whether this power leaves float16's range easily."""
    return name in _FULL_POWERS and half == "float16" and abs(int(params["y"])) > 2  # type: ignore[call-overload]


def changed_table(
    ops: Mapping[str, OpList] | None = None,
    **lists: Iterable[str] | str,
) -> Mapping[str, tuple[OpList, str]]:
    """The table with the user's changes.

    Args:
      ops: primitive's name -> list.
      lists: `lower=`, `full=`, `follow=`: names of primitives to put on that list.

    Raises:
      ValueError: for a list that there is not, for a name on two lists, and for a name that is empty.
      TypeError: for something that is no name, such as a function.
    """
    changes: dict[str, Any] = {}
    given = [*dict(ops or {}).items()]
    for op_list, names in lists.items():
        given += [(name, op_list) for name in ([names] if isinstance(names, str) else names)]
    for name, op_list in given:
        if not isinstance(name, str):
            raise TypeError(
                "The op lists of autocast hold names of primitives, as a jaxpr shows them ('dot_general'); "
                f"got {name!r} of type {type(name).__name__}."
            )
        if op_list not in get_args(OpList):
            raise ValueError(
                f"Unknown op list {op_list!r} for {name!r}. Known: {', '.join(get_args(OpList))}."
            )
        if changes.setdefault(name, op_list) != op_list:
            raise ValueError(
                f"The primitive {name!r} is on two lists, {changes[name]!r} and {op_list!r}; leave one."
            )
    return {**TABLE, **{name: (op_list, ASKED) for name, op_list in changes.items()}}


def unknown_names(names: Iterable[str], seen: Iterable[str]) -> list[str]:
    """Names on the caller's lists that are in no table and were not met, each with a suggestion."""
    seen = set(seen)
    known = {*TABLE, *seen}
    return [f"{name!r}.{did_you_mean(name, known)}" for name in names if name not in known]
