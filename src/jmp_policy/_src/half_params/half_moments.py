"""Keeps the moments of an optimizer in 16 or 8 bits: AdamW's 8 bytes of state per parameter become 4 or 2.1.

The wrapped transformation computes in float32, on moments that are widened for it; what it returns is rounded
again. Peers round to nearest, or only the first moment (`mu_dtype` of optax): a second moment changes by
`1 - b2` of itself in a step, 0.1 % with the usual 0.999, which is less than half the distance between
neighbours in bfloat16, 0.2 to 0.4 %, so that it would stay where it is. Rounded at random it is right on
average. Kahan summation would take the 2 bytes for which this is done.

In 8 bits each 128 numbers have a float32 scale. A second moment is kept as its square root, which has half
the range: the squares of two gradients that differ by 2**18, as far as float8 reaches below the largest of a
block, differ by 2**36. A square root that is not zero does not become zero either, or the first moment
would be divided by `eps` alone.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_policy._src.core.dtype_words import parse_dtype
from jmp_policy._src.core.dtypes import is_floating_array
from jmp_policy._src.core.narrowing import rounded
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.half_params.rounding import check_seed, is_half_array, random_bits, run_inner
from jmp_policy._src.loss_scaling.state import check_inner, check_state, init_inner

#: Fields of optax's states that hold moments, and which of the two dtypes is theirs.
_FIELDS = {"mu": "mu", "trace": "mu", "m": "mu", "nu": "nu", "nu_max": "nu", "n": "nu"}
#: States whose moments are subtracted from each other: rounded, the difference could become negative.
_EXACT = ("ScaleByRStdDevState", "ScaleByRStdDevWithCountState")

#: Name by which a user asks for it, that of the float8 recipe.
FP8_BLOCK = "fp8_block"

#: Numbers of the last axis that share a scale, and their dtype. torchao's 8-bit AdamW has blocks of 256.
BLOCK, FORMAT = 128, jnp.float8_e4m3fn

#: The number after half of the largest.
_ABOVE_HALF = np.float32(240)
_MAX, _SMALLEST = (np.float32(getattr(jnp.finfo(FORMAT), name)) for name in ("max", "smallest_subnormal"))


class HalfMomentsState(NamedTuple):
    """State of `half_moments`.

    Attributes:
      inner_state: state of the wrapped transformation, its moments in half precision, or each a pair
        `(values, scales)` of 8 bits and a scale per 128 of them.
      count: updates seen so far, int32 scalar, saturating; the random bits depend on it.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import half_moments
      >>> half_moments(optax.adam(0.1)).init(jnp.ones(3)).inner_state[0].nu.dtype
      dtype(bfloat16)
    """

    inner_state: Any
    count: Any


def half_moments(
    inner: Any, mu: Any = "bfloat16", nu: Any = "bfloat16", *, stochastic_rounding: bool = True, seed: Any = 0
) -> optax.GradientTransformationExtraArgs:
    """Keeps the moments of an optax optimizer in 16 or 8 bits; it still computes in float32.

    Use it where the optimizer's state is what fills the memory: AdamW's takes 4 bytes per parameter instead
    of 8, or 2.1 with "fp8_block" for both, SGD's momentum and Lion's half of that. Works inside and around
    `loss_scaled`: on a skipped step every moment keeps its bits. Prefer the inside,
    `loss_scaled(half_moments(tx), scale)`, where the count stays too.

    Moments are the fields `mu`, `nu`, `nu_max`, `trace`, `m` and `n` of optax's states: Adam family, Lion,
    SGD's momentum, RMSProp, also inside `chain`, `masked`, `multi_transform` and the like. What else a state
    holds, as Adafactor's rows and columns, is left as it is; so are scalars, numbers of 64 bits, and centred
    RMSProp, which subtracts one moment from the other.

    Args:
      inner: any optax transformation, or object with `init` and `update`.
      mu: dtype of first moments: "bfloat16", "float16", or "float32" to leave them; or "fp8_block", 8 bits
        (float8_e4m3fn) and a float32 scale per 128 numbers of the last axis.
      nu: dtype of second moments: "bfloat16", "float32" or "fp8_block", where square roots are kept. float16
        would lose squares below 6e-8.
      stochastic_rounding: round at random, so that small changes arrive on average; False rounds to nearest,
        where a second moment stops to follow when its gradients shrink.
      seed: an integer, for the random bits.

    Returns:
      A transformation. `init(params)` gives a `HalfMomentsState`. `update(grads, state, params, **extra)`
      returns the updates of `inner`. The random bits (threefry) depend on the seed, the number of the step,
      the moment and the place in it, and not on the devices; a moment that has not changed is not rounded.

    Raises:
      TypeError, ValueError: for an `inner` that is not a transformation, other dtypes, and in `update` for
        the state of another transformation.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params, tx = jnp.ones(4), half_moments(optax.adamw(1e-3))
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.ones(4), state, params)
      >>> state.inner_state[0].mu.dtype, updates.dtype
      (dtype(bfloat16), dtype('float32'))

    References:
      Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, section 3; Zamirai et al.,
      "Revisiting BFloat16 Training", 2020.
    """
    transformation = check_inner(inner, "half_moments")
    dtypes = {"mu": _dtype("mu", mu), "nu": _dtype("nu", nu)}
    if not isinstance(stochastic_rounding, bool):
        raise TypeError(f"stochastic_rounding must be True or False, got {stochastic_rounding!r}.")
    check_seed(seed)

    def init(params: PyTree) -> HalfMomentsState:
        state = init_inner(transformation, params, params)
        state = _map_moments(lambda x, kind: _narrow(x, kind, dtypes, None), state)
        return HalfMomentsState(state, jnp.int32(0))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, HalfMomentsState]:
        check_state(state, HalfMomentsState, "half_moments")
        wide = _map_moments(_widen, state.inner_state)
        new_updates, new = run_inner(transformation, updates, wide, params, extra_args)
        bits = iter(_bits(new, dtypes, state.count, seed)) if stochastic_rounding else itertools.repeat(None)
        new = _map_moments(lambda x, kind: _narrow(x, kind, dtypes, next(bits)), new)
        return new_updates, HalfMomentsState(new, optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def _dtype(name: str, given: Any) -> Any:
    """The dtype in which moments are kept, or `FP8_BLOCK`."""
    if isinstance(given, str) and given == FP8_BLOCK:
        return given
    try:
        dtype = parse_dtype(given, f"of {name}")
    except ValueError:
        dtype = None
    known = ("bfloat16", "float16", "float32") if name == "mu" else ("bfloat16", "float32")
    if dtype is None or dtype.name not in known:
        why = (
            " It holds squares of gradients, of which float16 loses those below 6e-8."
            if name == "nu" and dtype == jnp.float16
            else ""
        )
        raise ValueError(
            f"half_moments keeps {name} in {', '.join(known)} or {FP8_BLOCK}, got {given!r}.{why}"
        )
    return dtype


def _map_moments(change: Callable[[Any, str], Any], state: Any) -> Any:
    """The state with other arrays in the place of the moments, in the order of the state's leaves."""
    leaves, structure = jax.tree.flatten(state, is_leaf=is_block_scaled)
    return structure.unflatten(
        [change(x, kind) if kind else x for x, kind in zip(leaves, _kinds(state), strict=True)]
    )


def _kinds(state: Any, kind: str = "") -> list[str]:
    """Which of the two dtypes is that of each leaf of a state, `kind` of those around; "" for no moment."""
    children, structure = jax.tree.flatten(state, is_leaf=lambda node: node is not state)
    if is_block_scaled(state) or structure == jax.tree.structure(0):
        is_array = is_floating_array(state) and state.ndim > 0 and state.dtype.itemsize in (2, 4)
        return [kind if is_array or is_block_scaled(state) else ""]
    names = getattr(state, "_fields", ()) if _is_of_optax(state) else ()
    kinds = [_FIELDS.get(name, kind) for name in names] or [kind] * len(children)
    return [found for child, kind in zip(children, kinds, strict=True) for found in _kinds(child, kind)]


def _is_of_optax(state: Any) -> bool:
    # The names are too short to mean moments in any NamedTuple; libraries like optax name states as it does.
    name = type(state).__name__
    is_like = type(state).__module__.partition(".")[0] == "optax" or name.startswith("ScaleBy")
    return is_like and name not in _EXACT


def _widen(x: Any, kind: str) -> Any:
    if is_block_scaled(x):
        return widened(x, is_square=kind == "nu")
    return x.astype(jnp.float32) if is_half_array(x) else x


def _narrow(x: Any, kind: str, dtypes: dict[str, Any], bits: Any) -> Any:
    """Rounds a moment to its dtype."""
    dtype = dtypes[kind]
    if dtype == FP8_BLOCK:
        return narrowed_by_blocks(x.astype(jnp.float32), bits, is_square=kind == "nu")
    if dtype == jnp.float32 or x.dtype == dtype:
        return x.astype(dtype)
    return rounded(x.astype(jnp.float32), dtype, bits).astype(dtype)


def _bits(state: Any, dtypes: dict[str, Any], count: Any, seed: Any) -> list[Any]:
    """Draws the random bits for each of the moments, None for those that stay float32."""
    halves = {kind: jnp.bfloat16 if dtype == FP8_BLOCK else dtype for kind, dtype in dtypes.items()}
    leaves = zip(jax.tree.leaves(state, is_leaf=is_block_scaled), _kinds(state), strict=True)
    moments = [jax.ShapeDtypeStruct(x.shape, halves[kind]) for x, kind in leaves if kind]
    return random_bits(seed, count, moments)


class BlockScaled(NamedTuple):
    """A moment in 8 bits.

    Attributes:
      values: float8_e4m3fn of the moment's shape.
      scales: float32 powers of two, by which values are multiplied; of the moment's shape, but for the last
        axis, which has one for each 128 numbers.
    """

    values: Any
    scales: Any


def is_block_scaled(x: Any) -> bool:
    """Whether a node of a state is a moment in 8 bits."""
    return isinstance(x, BlockScaled)


def narrowed_by_blocks(x: jax.Array, bits: Any, *, is_square: bool) -> BlockScaled:
    """Rounds a moment to 8 bits.

    Args:
      x: float32 array of at least one axis.
      bits: uint32 of its shape to round at random, None to round to nearest.
      is_square: whether it is a second moment, which is kept as its square root.

    Returns:
      The moment; that of what `widened` gives is the same, bit for bit.
    """
    # With its sign, which what some optimizers call `nu` has.
    x = jnp.sign(x) * jnp.sqrt(jnp.abs(x)) if is_square else x
    scales, largest = _block_scales(x)
    new = rounded(x / _repeated(scales, x), FORMAT, bits)
    if is_square:
        new = jnp.where((x != 0) & (new == 0), jnp.sign(x) * _SMALLEST, new)
    # The largest of a block is above half of the range, and must not become half: it would get another scale.
    is_half = (jnp.abs(x) == _repeated(largest, x)) & (jnp.abs(new) == _MAX / 2)
    new = jnp.where(is_half, jnp.sign(x) * _ABOVE_HALF, new)
    return BlockScaled(new.astype(FORMAT), scales)


def widened(x: BlockScaled, *, is_square: bool) -> jax.Array:
    """The float32 moment that was rounded."""
    wide = x.values.astype(jnp.float32) * _repeated(x.scales, x.values)
    return wide * jnp.abs(wide) if is_square else wide


def _block_scales(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least powers of two by which blocks can be divided to fit the format, and their largest numbers.

    Of blocks of zeros the scale is 1; numbers that are not finite do not count.
    """
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)]
    finite = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    blocks = jnp.pad(finite, padding).reshape(*x.shape[:-1], -(-x.shape[-1] // BLOCK), BLOCK)
    largest = blocks.max(-1)
    fraction, exponent = jnp.frexp(largest / _MAX)
    exponent = jnp.where(fraction == 0.5, exponent - 1, exponent)
    return jnp.where(fraction > 0, jnp.ldexp(np.float32(1), jnp.maximum(exponent, -100)), 1), largest


def _repeated(values: jax.Array, x: Any) -> jax.Array:
    return jnp.repeat(values, BLOCK, axis=-1)[..., : x.shape[-1]]
