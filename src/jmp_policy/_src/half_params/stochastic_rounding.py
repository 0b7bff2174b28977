"""Trains half-precision parameters by stochastic rounding, by which small updates arrive on average."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.half_params.rounding import change, check_some_half, is_half_array, random_bits, rounded
from jmp_policy._src.loss_scaling.loss_scale import tree_to_float32
from jmp_policy._src.loss_scaling.transformation import (
    Transformation,
    check_inner,
    check_params,
    check_seed,
    check_state,
    init_inner,
    run_inner,
    unalias,
)


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
        return StochasticRoundingState(
            unalias(init_inner(transformation, tree_to_float32(params)), params), jnp.int32(0)
        )

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
        return jax.tree.map(_update, params, steps, bits), StochasticRoundingState(inner_state, count)

    return optax.GradientTransformationExtraArgs(init, update)


def _update(p: Any, step: Any, bits: Any) -> Any:
    if not is_half_array(p):
        return step
    p32 = jnp.asarray(p, jnp.float32)
    return change(p32, rounded(p32 + jnp.asarray(step, jnp.float32), p.dtype, bits))
