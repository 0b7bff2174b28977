"""What the library knows of each primitive: one row per primitive, with the reason.

A newcomer adds an operation here, and a program that uses it in `tests/autocast_helpers.py`. Data only: what
the lists and traits mean is said at `OpList` and `Trait`, and done by those who ask.

The lists are drawn from what PyTorch (`autocast_mode.h`) and TensorFlow (`auto_mixed_precision_lists.h`)
agree on, by names of JAX's primitives.
"""

import enum
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

#: What autocast does. lower: operands to half. full: float32. follow: as the widest operand. inside:
#: computed in float32; the result is half where the operands are.
OpList: TypeAlias = Literal["lower", "full", "follow", "inside"]


class Trait(enum.Flag):
    """A property of a primitive that some analysis asks for."""

    NONE = 0
    #: A matrix product: it has FLOPs to count and may reach the Tensor Cores.
    PRODUCT = enum.auto()
    #: Rearranges an array, or each of several. A parameter stays one.
    MOVES = enum.auto()
    #: Makes copies, whose transpose is a sum: done in float32, before a parameter is cast.
    SUMMED = enum.auto()
    #: Elementwise with several operands, of which one may be broadcast along axes of size 1, or be a scalar.
    BROADCASTS = enum.auto()
    #: Of one weight, gives that weight rearranged, or rows of it.
    KEEPS_WEIGHT = enum.auto()
    #: Computes nothing of its operand's elements; an argument is still recognised behind it.
    VIEW = enum.auto()
    #: Joins arrays: of arguments alone, it gives one.
    JOINS = enum.auto()
    #: Its result is kept for the backward pass, as compilers do: computing it again would cost too much.
    COSTLY = enum.auto()
    #: Not finite, or without a derivative, where an operand is zero.
    POLE = enum.auto()
    #: Communicates with other devices.
    COLLECTIVE = enum.auto()
    #: What it does depends on the dtype or the bits of its operands, or it is written for one dtype.
    DTYPE_BOUND = enum.auto()
    #: Code that is no jaxpr: nobody can look inside.
    KERNEL = enum.auto()
    #: The jaxpr among its parameters says how two elements combine, or how it is lowered.
    COMBINER = enum.auto()
    #: Gives each element from those in its place, cheaply enough to be computed again for a backward pass.
    ELEMENTWISE = enum.auto()
    #: Its derivative depends on its operands, which JAX keeps for the backward pass, or its result.
    NONLINEAR = enum.auto()
    #: Its results are numbers that its operands were: exact in half, if those are half.
    EXACT = enum.auto()
    #: Its transpose gives copies or parts of a cotangent, and zeros; sums over copies are looked at apart.
    EXACT_TRANSPOSE = enum.auto()
    #: Errors of its operands add up as they are.
    ADDS = enum.auto()
    #: Rounds after each of many steps, in an order that only the compiler knows.
    ACCUMULATES = enum.auto()
    #: Done in several steps by XLA, each of which rounds: the sigmoid is 1 / (1 + exp(-x)).
    IN_STEPS = enum.auto()
    #: An accumulation with as many terms as its operand has elements for each of its result.
    REDUCES = enum.auto()
    #: Compares or rounds: a small change of its operands may turn its result.
    DECIDES = enum.auto()
    #: Orders its operands, or picks some of them by their order.
    RANKS = enum.auto()
    #: Compares its operands: with an infinite number as with any beyond the others.
    COMPARISON = enum.auto()
    #: May be given an infinite number, as a bound or a filling that no other number exceeds.
    BOUNDED = enum.auto()
    #: Keeps its operand below or above a bound.
    CLIPS = enum.auto()
    #: Its results are no less than zero where its operands are.
    KEEPS_SIGN = enum.auto()
    #: A sum or difference of two arrays: with a loop's carry, a sum of one term per trip.
    ADDITION = enum.auto()
    #: Adds rows to an array one after another.
    SCATTER_SUM = enum.auto()
    #: How a model uses a bias or a scale: with an array of rows, and the same for all of them.
    TAKES_BIAS = enum.auto()
    #: JAX has none of half arrays.
    NOT_HALF = enum.auto()


class Operation(NamedTuple):
    """What is known of a primitive.

    Args:
      op_list: its list in autocast; None for one that runs in the dtypes it was traced in.
      reason: why.
      traits: what else matters.
    """

    op_list: OpList | None
    reason: str
    traits: Trait = Trait.NONE


(
    _PRODUCT, _MOVES, _SUMMED, _BROADCASTS, _KEEPS_WEIGHT, _VIEW, _JOINS, _COSTLY, _POLE, _COLLECTIVE,
    _DTYPE_BOUND, _KERNEL, _COMBINER, _ELEMENTWISE, _NONLINEAR, _EXACT, _EXACT_TRANSPOSE, _ADDS, _ACCUMULATES,
    _IN_STEPS, _REDUCES, _DECIDES, _RANKS, _COMPARISON, _BOUNDED, _CLIPS, _KEEPS_SIGN, _ADDITION,
    _SCATTER_SUM, _TAKES_BIAS, _NOT_HALF,
) = Trait  # fmt: skip

#: Exact forward and backward.
_SAFE = _EXACT | _EXACT_TRANSPOSE

#: What copies a weight, or moves it, and leaves it one.
_COPIED_WEIGHT = _MOVES | _KEEPS_WEIGHT | _EXACT
_WEIGHT = _COPIED_WEIGHT | _EXACT_TRANSPOSE

#: Elementwise functions of one operand, or of several.
_CURVE = _ELEMENTWISE | _NONLINEAR
_EACH = _BROADCASTS | _ELEMENTWISE

#: Sums of two, and of many.
_PLUS = _EACH | _EXACT_TRANSPOSE | _ADDS | _ADDITION
_SUM = _ACCUMULATES | _REDUCES | _KEEPS_SIGN

#: What nobody looks into, and runs as it was written.
_CLOSED = _COSTLY | _DTYPE_BOUND | _KERNEL | _COMBINER


def _same(names: str, op_list: OpList | None, reason: str, traits: Trait) -> dict[str, Operation]:
    """The rows of primitives of which the same is known."""
    return dict.fromkeys(names.split(), Operation(op_list, reason, traits))


_TENSOR_CORES = "Tensor Cores take half operands and accumulate in float32"

OPERATIONS: Mapping[str, Operation] = {
    # Matrix products: Tensor Cores.
    **_same("dot_general conv_general_dilated", "lower", _TENSOR_CORES, _PRODUCT | _COSTLY),
    "ragged_dot_general": Operation("lower", "a dot per group (mixture of experts)", _PRODUCT | _COSTLY),
    # In float32.
    **_same("exp expm1", "full", "multiplies a large operand's rounding; exceeds float16 above 11.1", _CURVE),
    "exp2": Operation("full", "exceeds float16 at 16", _CURVE | _IN_STEPS),
    "log": Operation("full", "half loses all digits near 1", _CURVE | _POLE),
    "log2": Operation("full", "half loses all digits near 1", _CURVE),
    "log1p": Operation("full", "its small arguments are subnormal in float16", _CURVE | _POLE),
    "pow": Operation("full", "exceeds float16 easily; the exponent's rounding is multiplied", _CURVE | _POLE),
    **_same("sqrt rsqrt", "full", "of variances, which are below float16's normal range", _CURVE | _POLE),
    "cbrt": Operation("full", "as sqrt", _CURVE | _POLE),
    "erfc": Operation("full", "its tail is below float16's range", _CURVE),
    **_same("sin cos", "full", "of positions: no fraction above 2048 in float16, 256 in bfloat16", _CURVE),
    "tan": Operation("full", "as sin", _CURVE),
    **_same("asin acos", "full", "steep near 1", _CURVE),
    "atan": Operation("full", "as the other inverse functions", _CURVE),
    "atan2": Operation("full", "a quotient that may exceed float16", _CURVE),
    **_same("sinh cosh", "full", "as exp; exceeds float16 above 11.8", _CURVE),
    **_same("asinh acosh", "full", "a logarithm", _CURVE),
    "atanh": Operation("full", "a logarithm, steep near 1", _CURVE),
    "reduce_sum": Operation(
        "full",
        "many terms: stops growing at 2048 times a term in float16, 256 in bfloat16",
        _EXACT_TRANSPOSE | _SUM,
    ),
    "reduce_prod": Operation("full", "many factors: leaves float16's range", _ACCUMULATES),
    "cumsum": Operation("full", "as reduce_sum", _COSTLY | _ACCUMULATES | _KEEPS_SIGN),
    "cumprod": Operation("full", "as reduce_prod", _COSTLY | _ACCUMULATES),
    "cumlogsumexp": Operation("full", "a logarithm of a sum", _COSTLY | _ACCUMULATES),
    "reduce_window_sum": Operation("full", "as reduce_sum (average pooling)", _COSTLY | _SUM),
    "psum": Operation("full", "a sum over devices", _COSTLY | _COLLECTIVE | _ACCUMULATES),
    **_same(
        "psum_invariant reduce_scatter unreduced_psum",
        "full",
        "a sum over devices",
        _COLLECTIVE | _ACCUMULATES,
    ),
    "argmax": Operation("full", "a decision: ties that half would make", _SAFE | _RANKS),
    **_same("argmin top_k", "full", "a decision: ties that half would make", _EXACT | _RANKS),
    "sort": Operation("full", "a decision: ties that half would make", _COSTLY | _COMBINER | _EXACT | _RANKS),
    # As the widest operand.
    "add": Operation("follow", "exact to half's rounding", _PLUS | _TAKES_BIAS),
    "add_any": Operation("follow", "a sum of two cotangents", _PLUS),
    "sub": Operation("follow", "exact to half's rounding", _PLUS),
    "mul": Operation("follow", "exact to half's rounding", _EACH | _NONLINEAR | _TAKES_BIAS),
    "div": Operation(
        "follow", "exact to half's rounding; see autocast/operation_rules.py", _EACH | _NONLINEAR | _POLE
    ),
    "neg": Operation("follow", "exact", _ELEMENTWISE | _SAFE),
    **_same("sign floor ceil round", "follow", "exact", _ELEMENTWISE | _SAFE | _DECIDES),
    "abs": Operation("follow", "exact", _CURVE | _SAFE),
    **_same("max min", "follow", "exact", _EACH | _SAFE | _ADDS | _BOUNDED | _CLIPS),
    "clamp": Operation("follow", "exact", _ELEMENTWISE | _SAFE | _ADDS | _BOUNDED | _CLIPS),
    "rem": Operation("follow", "exact to half's rounding; see autocast/operation_rules.py", _EACH | _POLE),
    "square": Operation(
        "follow",
        "a product; float16 overflows above 255, see look-ahead for sums of squares",
        _CURVE,
    ),
    "one_minus_square": Operation("follow", "a product; the derivative of tanh", _CURVE),
    "integer_pow": Operation(
        "follow", "a product of few factors; see autocast/operation_rules.py", _CURVE | _POLE
    ),
    "tanh": Operation("follow", "bounded, and 1-Lipschitz", _CURVE),
    "logistic": Operation("follow", "bounded, and 1/4-Lipschitz", _CURVE | _IN_STEPS),
    "select_n": Operation("follow", "picks a value", _EACH | _SAFE | _ADDS | _KEEPS_SIGN),
    **_same("eq lt le gt ge", "follow", "a comparison", _EACH | _EXACT_TRANSPOSE | _DECIDES | _COMPARISON),
    "ne": Operation("follow", "a comparison", _EACH | _EXACT_TRANSPOSE | _COMPARISON),
    "is_finite": Operation("follow", "a comparison", _ELEMENTWISE | _EXACT_TRANSPOSE),
    **_same("cummax cummin", "follow", "exact", _COSTLY | _EXACT),
    "reduce_window_max": Operation("follow", "exact (max pooling)", _COSTLY | _SAFE),
    "reduce_window_min": Operation("follow", "exact", _EXACT),
    **_same("pmax pmin", "follow", "exact", _COLLECTIVE | _EXACT),
    **_same("concatenate stack", "follow", "moves data", _JOINS | _SAFE | _ADDS),
    "dynamic_update_slice": Operation("follow", "moves data", _COSTLY | _EXACT | _ADDS),
    "dynamic_slice": Operation("follow", "moves data", _KEEPS_WEIGHT | _SAFE),
    "all_gather": Operation("follow", "moves data", _KEEPS_WEIGHT | _COSTLY | _COLLECTIVE | _EXACT),
    "all_gather_invariant": Operation("follow", "moves data", _KEEPS_WEIGHT | _COLLECTIVE | _EXACT),
    **_same("all_to_all ppermute", "follow", "moves data", _COSTLY | _COLLECTIVE | _EXACT),
    "pbroadcast": Operation("follow", "moves data", _SUMMED | _COLLECTIVE),
    "broadcast_in_dim": Operation("follow", "moves data", _WEIGHT | _SUMMED | _VIEW),
    **_same("reshape transpose squeeze", "follow", "moves data", _WEIGHT | _VIEW),
    **_same("rev slice split unstack", "follow", "moves data", _WEIGHT),
    "tile": Operation("follow", "moves data", _COPIED_WEIGHT | _SUMMED),
    "copy": Operation("follow", "moves data", _ELEMENTWISE | _WEIGHT | _VIEW),
    "name": Operation("follow", "names a residual for a remat policy", _MOVES | _VIEW | _SAFE),
    "stop_gradient": Operation("follow", "identity", _MOVES | _SAFE),
    "sharding_constraint": Operation("follow", "identity", _WEIGHT | _VIEW),
    **_same("layout_constraint reshard", "follow", "identity", _WEIGHT),
    "pvary": Operation("follow", "identity", _COPIED_WEIGHT | _SUMMED | _VIEW | _COLLECTIVE),
    "device_put": Operation("follow", "moves data, each operand for itself", _WEIGHT),
    "optimization_barrier": Operation("follow", "identity, each operand for itself", _WEIGHT | _VIEW),
    # In float32 inside, for the sake of the derivative.
    "gather": Operation("inside", "its gradient is a sum over the rows", _KEEPS_WEIGHT | _SAFE),
    "pad": Operation("inside", "the gradient of what it pads with is a sum", _SAFE | _ADDS | _BOUNDED),
    **_same(
        "reduce_max reduce_min", "inside", "its gradient is a sum over ties", _SAFE | _BOUNDED | _KEEPS_SIGN
    ),
    "erf": Operation("inside", "its derivative is an exponential", _CURVE),
    # In the dtypes that they were traced in.
    "scaled_dot": Operation(None, "a product with scales per block", _PRODUCT),
    "convert_element_type": Operation(None, "a cast", _VIEW),
    "reduce_precision": Operation(None, "rounds to fewer bits, in the same dtype", _VIEW | _COMBINER),
    "as_cast_of": Operation(
        None, "a half value, with the gradient to a float32 one", _ELEMENTWISE | _VIEW | _SAFE
    ),
    **_same("cholesky eigh lu qr svd triangular_solve", None, "linear algebra", _COSTLY | _NOT_HALF),
    "custom_vjp_call": Operation(None, "its backward pass is for the dtypes of its forward pass"),
    "custom_partitioning": Operation(None, "a function with a partitioning of its own", _CLOSED),
    **_same("bcoo_dot_general bcsr_dot_general", None, "a product with a sparse matrix", _COSTLY | _KERNEL),
    "ffi_call": Operation(None, "a foreign function", _COSTLY | _KERNEL),
    "fft": Operation(None, "a Fourier transform: JAX has none of half arrays", _COSTLY | _NOT_HALF),
    **_same("io_callback pure_callback", None, "Python code on the host", _COSTLY | _KERNEL),
    "pallas_call": Operation(None, "a kernel written for its dtypes", _CLOSED),
    **_same("random_bits rng_bit_generator threefry2x32", None, "draws random numbers", _COSTLY),
    "random_gamma": Operation(None, "draws random numbers, in its dtype", _COSTLY | _DTYPE_BOUND),
    "reduce_window": Operation(
        None, "a reduction by a function of the user's", _COSTLY | _COMBINER | _ACCUMULATES
    ),
    "scatter": Operation(None, "writes rows", _COSTLY | _COMBINER | _EXACT | _ADDS),
    "scatter-add": Operation(
        None,
        "adds rows: the gradient of a look-up",
        _COSTLY | _COMBINER | _ADDS | _ACCUMULATES | _SCATTER_SUM,
    ),
    "scatter-max": Operation(None, "the larger of rows", _COSTLY | _COMBINER),
    "scatter-min": Operation(None, "the smaller of rows", _COSTLY | _COMBINER),
    "scatter-mul": Operation(None, "multiplies rows", _COSTLY | _COMBINER | _ACCUMULATES),
    "select_and_scatter_add": Operation(None, "the gradient of max pooling", _COSTLY | _ACCUMULATES | _RANKS),
    "approx_top_k": Operation(None, "the largest elements, most of them", _RANKS),
    "select_and_gather_add": Operation(None, "picks elements by others", _EXACT),
    "bitcast_convert_type": Operation(None, "reads the bits of its operand", _DTYPE_BOUND),
    "debug_print": Operation(None, "prints what it is given", _DTYPE_BOUND),
    "nextafter": Operation(None, "the next number in its dtype", _DTYPE_BOUND),
    "rng_uniform": Operation(None, "draws random numbers, in its dtype", _DTYPE_BOUND),
    "scaled_matmul_wrapper": Operation(None, "a kernel written for its dtypes", _DTYPE_BOUND),
    "reduce": Operation(None, "a reduction by a function of the user's", _COMBINER | _ACCUMULATES | _REDUCES),
    "select_and_scatter": Operation(None, "max pooling's gradient, by functions of the user's", _COMBINER),
}


#: Operators of Python that a primitive is written as.
PYTHON_OPERATORS: Mapping[str, str] = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "rem": "%",
    "pow": "**",
}

#: What reports call a primitive, before the dtype.
DESCRIPTIONS: Mapping[str, str] = {
    "convert_element_type": "a cast to",
    "dot_general": "a matrix product in",
    "conv_general_dilated": "a convolution in",
}

#: What makes the result of a primitive infinite or NaN in any precision, and the repair.
NOT_FINITE: Mapping[str, str] = {
    "div": "A division by zero, in any precision. Guard the divisor itself (jnp.where(x == 0, 1, x) before "
    "dividing): a where after the division stops the value, but its gradient is 0 * inf = NaN.",
    "log": "A logarithm of zero or of a negative number, in any precision. Clamp its argument, or use "
    "log_softmax, log1p, xlogy or logsumexp.",
    "sqrt": "A square root of a negative number, in any precision. Clamp its argument.",
    "rsqrt": "A reciprocal square root of zero or of a negative number, in any precision. Add an epsilon.",
    "sub": "inf - inf: most often a row of a mask that is all -inf. Use jnp.finfo(dtype).min / 2, or leave "
    "one entry unmasked.",
    "mul": "0 * inf, or a product beyond float32. In a backward pass it is most often the gradient of a "
    "where whose other branch is infinite: guard the argument before the operation, not the result after it.",
    "exp": "An exponential beyond float32. Subtract the maximum first (logsumexp, softmax).",
    "pow": "A power of zero or of a negative number, in any precision. Clamp its base.",
}


#: Trait -> the names of the primitives that have it.
HAVING: Mapping[Trait, frozenset[str]] = {
    trait: frozenset(name for name, operation in OPERATIONS.items() if trait in operation.traits)
    for trait in Trait
}

#: Primitive's name -> (list, reason), of those on a list.
LISTED: Mapping[str, tuple[OpList, str]] = {
    name: (op_list, reason) for name, (op_list, reason, _) in OPERATIONS.items() if op_list is not None
}

#: Primitive's name -> why it runs as traced, of those that are known and on no list.
NOT_LISTED: Mapping[str, str] = {
    name: f"as traced: {reason}" for name, (op_list, reason, _) in OPERATIONS.items() if op_list is None
}

#: Products that are linear in each floating operand, which are those that take half operands.
LOWERED = frozenset(name for name, (op_list, _) in LISTED.items() if op_list == "lower")

BROADCASTING, MOVES, SUMMED = map(HAVING.__getitem__, (Trait.BROADCASTS, Trait.MOVES, Trait.SUMMED))
