"""Trains half-precision parameters without float32 masters: by stochastic rounding, or by Kahan summation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.half_params.rounding import (
    change,
    check_params,
    check_seed,
    check_some_half,
    is_half_array,
    random_bits,
    rounded,
    run_inner,
)
from jmp_policy._src.loss_scaling.loss_scale import tree_to_float32
from jmp_policy._src.loss_scaling.transformation import Transformation, check_inner, check_state, init_inner


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      inner_state: state of the wrapped transformation.
      count: updates seen so far, int32 scalar, saturating; the random bits depend on it.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> int(stochastic_rounding(optax.sgd(0.1)).init(jnp.float16(2.0)).count)
      0
    """

    inner_state: optax.OptState
    count: Any


def stochastic_rounding(inner: Transformation, seed: Any = 0) -> optax.GradientTransformationExtraArgs:
    """Trains float16 or bfloat16 parameters without masters, rounding each new value at random.

    The sum of parameter and update, computed in float32, goes to one of its two neighbours with the
    probability that makes its expectation the sum itself: small updates arrive on average. It takes no
    memory; the price is noise, of up to half the distance between neighbours per parameter and step.

    Args:
      inner: any optax transformation, or object with `init` and `update`. Put `loss_scaled` inside, and
        this outermost: the wrapped transformation gets float32 parameters.
      seed: an integer, which may be traced: members of an ensemble under `vmap` that are to differ in their
        noise need different seeds.

    Returns:
      A transformation. `init(params)` gives a `StochasticRoundingState`. `update(grads, state, params,
      **extra)` returns float32 updates with which `optax.apply_updates(params, updates)` gives the rounded
      values (as exactly as `master_weights`). An update of zero changes no bit; a finite sum becomes
      infinite only where rounding to nearest makes it so. The random bits (threefry) depend on the seed, the
      number of the step, the leaf and the place in it, and not on the devices. In `shard_map` each device
      uses the same bits for its part. Leaves that are not half get the updates of `inner`.

    Raises:
      TypeError, ValueError: as `master_weights`; and where no parameter is half.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = jnp.ones(1000, jnp.bfloat16)
      >>> tx = stochastic_rounding(optax.sgd(2.0**-9))
      >>> updates, state = tx.update(-params, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> sorted(set(params.tolist())), abs(float((params > 1).mean()) - 0.25) < 0.05  # A quarter of the way.
      ([1.0, 1.0078125], True)

    References:
      Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, section 3.
    """
    transformation = check_inner(inner, "stochastic_rounding")
    check_seed(seed)

    def init(params: PyTree) -> StochasticRoundingState:
        check_some_half(params, "stochastic_rounding")
        inner_state = init_inner(transformation, tree_to_float32(params), params)
        return StochasticRoundingState(inner_state, jnp.int32(0))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, StochasticRoundingState]:
        check_state(state, StochasticRoundingState, "stochastic_rounding")
        check_params(params, updates, "stochastic_rounding")
        check_some_half(params, "stochastic_rounding")
        steps, inner_state = run_inner(
            transformation, updates, state.inner_state, tree_to_float32(params), extra_args
        )
        bits = random_bits(seed, state.count, params)
        count = optax.safe_increment(state.count)
        return jax.tree.map(_randomly_rounded, params, steps, bits), StochasticRoundingState(
            inner_state, count
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _randomly_rounded(p: Any, step: Any, bits: Any) -> Any:
    if not is_half_array(p):
        return step
    p32 = jnp.asarray(p, jnp.float32)
    return change(p32, rounded(p32 + jnp.asarray(step, jnp.float32), p.dtype, bits))


class KahanSummationState(NamedTuple):
    """State of `kahan_summation`.

    Attributes:
      inner_state: state of the wrapped transformation.
      compensation: the rounding error to be added to the parameter, times 2**8 (bfloat16) or 2**11 (float16,
        in which it would otherwise be a subnormal number or 0); in the parameter's dtype.
        `optax.MaskedNode()` in the places of parameters that are not half.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> kahan_summation(optax.sgd(0.1)).init(jnp.float16(2.0)).compensation.dtype
      dtype('float16')
    """

    inner_state: optax.OptState
    compensation: PyTree


def kahan_summation(inner: Transformation) -> optax.GradientTransformationExtraArgs:
    """Trains float16 or bfloat16 parameters with a second half number that holds the rounding error of each.

    Parameter and compensation together hold 17 bits of significand (bfloat16) or 23 (float16; float32 has
    24), for 2 bytes more per parameter, where `master_weights` takes 4. An update of less than 2**-17 or
    2**-23 of its parameter may still vanish. Deterministic.

    A parameter changed from outside keeps its compensation if that is below half the distance to its
    neighbour, and loses it otherwise.

    Args:
      inner: any optax transformation, or object with `init` and `update`. Put `loss_scaled` inside, and
        this outermost: the wrapped transformation gets parameter plus compensation, as float32.

    Returns:
      A transformation. `init(params)` gives a `KahanSummationState`. `update(grads, state, params, **extra)`
      returns float32 updates with which `optax.apply_updates(params, updates)` gives the sum rounded to
      nearest (as exactly as `master_weights`). An update of zero changes no bit. Leaves that are not half
      get the updates of `inner`.

    Raises:
      TypeError, ValueError: as `master_weights`; and where no parameter is half.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params, tx = jnp.float16(1.0), kahan_summation(optax.sgd(2.0**-13))
      >>> state = tx.init(params)
      >>> for _ in range(1024):
      ...     updates, state = tx.update(jnp.float16(-1.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params)
      1.125

    References:
      Kahan, "Further remarks on reducing truncation errors", CACM 1965; Zamirai et al., "Revisiting
      BFloat16 Training", 2020, section 4.
    """
    transformation = check_inner(inner, "kahan_summation")

    def init(params: PyTree) -> KahanSummationState:
        check_some_half(params, "kahan_summation")
        inner_state = init_inner(transformation, tree_to_float32(params), params)
        return KahanSummationState(inner_state, jax.tree.map(_no_compensation, params))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, KahanSummationState]:
        check_state(state, KahanSummationState, "kahan_summation")
        check_params(params, updates, "kahan_summation")
        check_some_half(params, "kahan_summation")
        exact = jax.tree.map(_sum, params, state.compensation)
        steps, inner_state = run_inner(transformation, updates, state.inner_state, exact, extra_args)
        both = jax.tree.map(_compensated, params, state.compensation, steps)
        new_updates = jax.tree.map(lambda p, x: x[0], params, both)
        compensation = jax.tree.map(lambda p, x: x[1], params, both)
        return new_updates, KahanSummationState(inner_state, compensation)

    return optax.GradientTransformationExtraArgs(init, update)


def _no_compensation(p: Any) -> Any:
    # Zeros that depend on the parameter get its sharding under jit; zeros_like lies on every device.
    return jnp.minimum(jnp.abs(p), jnp.zeros((), p.dtype)) if is_half_array(p) else optax.MaskedNode()


def _rounding_error(p: jax.Array, compensation: jax.Array) -> jax.Array:
    """The compensation in units of the parameter, float32; 0 where it exceeds any rounding error.

    It then belongs to another value: the parameter was changed from outside.
    """
    possible = jnp.maximum(jnp.abs(p), jnp.finfo(p.dtype).smallest_normal)
    error = jnp.asarray(compensation, jnp.float32) / _magnification(p)
    return jnp.where(jnp.abs(compensation) <= possible, error, 0)


def _magnification(p: jax.Array) -> float:
    return 2.0 ** (jnp.finfo(p.dtype).nmant + 1)


def _sum(p: Any, compensation: Any) -> Any:
    """Adds a parameter and its compensation, as float32 for the wrapped transformation."""
    if not is_half_array(p):
        return tree_to_float32(p)
    return jnp.asarray(p, jnp.float32) + _rounding_error(p, compensation)


def _compensated(p: Any, compensation: Any, step: Any) -> tuple[Any, Any]:
    """The update, which rounds parameter plus step plus compensation, and the new compensation."""
    if not is_half_array(p):
        return step, compensation
    p32, step = jnp.asarray(p, jnp.float32), jnp.asarray(step, jnp.float32)
    step_and_error = step + _rounding_error(p, compensation)
    new = rounded(p32 + step_and_error, p.dtype)
    error = ((p32 - new) + step_and_error) * _magnification(p)
    error = jnp.where(jnp.isfinite(new), error, 0).astype(p.dtype)
    # An error of exactly half the distance would round again, and an update of zero move the parameter.
    still = step == 0
    return change(p32, jnp.where(still, p32, new)), jnp.where(still, compensation, error)
