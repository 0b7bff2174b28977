"""Trains parameters stored in half precision: with float32 masters, stochastic rounding or Kahan summation.

Different from the peers, the training step stays the same: `optax.apply_updates` with the returned updates
gives the rounded parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_policy._src.core.dtypes import is_floating_array, promote_dtype
from jmp_policy._src.core.narrowing import AWAY_FROM_ZERO, TOWARDS_ZERO, rounded
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.half_params.rounding import (
    change,
    check_seed,
    check_some_half,
    is_half_array,
    random_bits,
    run_inner,
)
from jmp_policy._src.loss_scaling.loss_scale import tree_to_float32
from jmp_policy._src.loss_scaling.state import Transformation, check_inner, check_state, init_inner


def _training_half(
    inner: Transformation,
    wrapper: str,
    state_type: Any,
    kept: str,
    start: Callable[[Any], Any],
    exact: Callable[[Any, Any], Any],
    finish: Callable[..., tuple[Any, Any]],
    seed: Any = None,
    needs_half: str = "",
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transformation, which computes in float32 on more digits than half parameters hold.

    Args:
      inner: what is wrapped.
      wrapper: the wrapper's name, for messages.
      state_type: the class of its state: `inner_state`, what it keeps of each parameter, `count` of updates.
      kept: the name of what it keeps; "" for nothing.
      start: `p -> own`, what is kept of a parameter at first.
      exact: `(p, own) -> p32`, the parameter that `inner` gets.
      finish: `(p, p32, step, own, bits) -> (update, own)`, given the update of `inner` and random bits.
      seed: of the bits; None for no bits.
      needs_half: what says in a message that there must be a half parameter; empty where it need not.
    """
    transformation = check_inner(inner, wrapper)

    def state_of(inner_state: Any, own: Any, count: Any) -> Any:
        fields = {"inner_state": inner_state, kept: own, "count": count}
        return state_type(**{name: fields[name] for name in state_type._fields})

    def init(params: PyTree) -> Any:
        if needs_half:
            check_some_half(params, needs_half)
        own = jax.tree.map(start, params)
        inner_state = init_inner(transformation, tree_to_float32(params), params)
        return state_of(inner_state, own, None if seed is None else jnp.int32(0))

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, Any]:
        check_state(state, state_type, wrapper)
        if params is None and jax.tree.leaves(updates):
            raise ValueError(
                f"{wrapper} needs the parameters to compute their updates: call "
                "tx.update(grads, state, params)."
            )
        if needs_half:
            check_some_half(params, needs_half)
        bits, count = jax.tree.map(lambda p: None, params), getattr(state, "count", 0)
        own = getattr(state, kept) if kept else bits
        params32 = jax.tree.map(exact, params, own)
        steps, inner_state = run_inner(transformation, updates, state.inner_state, params32, extra_args)
        if seed is not None:
            bits, count = random_bits(seed, count, params), optax.safe_increment(count)
        both = jax.tree.map(finish, params, params32, steps, own, bits)
        new_updates, own = (jax.tree.map(lambda p, pair, i=i: pair[i], params, both) for i in range(2))
        return new_updates, state_of(inner_state, own, count)

    return optax.GradientTransformationExtraArgs(init, update)


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
      inner_state: state of the wrapped transformation.
      masters: the parameters as float32; `optax.MaskedNode()` in the places of those that have no master.
      count: updates seen so far, int32 scalar, where masters are rounded stochastically; None otherwise.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import master_weights
      >>> master_weights(optax.sgd(0.1)).init({"w": jnp.float16(2.0)}).masters["w"].dtype
      dtype('float32')
    """

    inner_state: optax.OptState
    masters: PyTree
    count: Any = None


def master_weights(
    inner: Transformation, *, stochastic_rounding: bool = False, seed: Any = 0
) -> optax.GradientTransformationExtraArgs:
    """Trains float16 or bfloat16 parameters through float32 masters, which it keeps in its state.

    Use it where the model's parameters themselves must be half. With a policy of float32 parameters
    (`mixed_float16`) the parameters are masters already. Both `master_weights(loss_scaled(tx, scale))` and
    `loss_scaled(master_weights(tx), scale)` work. Prefer the first: in the second, `loss_scaled` passes
    float32 copies of the parameters, so that their dtype is unknown, and a parameter that changes by more
    than a factor of 2 in one step is rounded twice.

    The masters follow parameters that were changed from outside (a checkpoint loaded, weights clipped): a
    parameter that is not its master rounded becomes the new master. Restore the optimizer state along with
    the parameters to keep the bits that only masters have.

    Args:
      inner: any optax transformation, or object with `init` and `update`.
      stochastic_rounding: round the masters into the parameters at random, so that the parameters'
        expectations are the masters, instead of to nearest. A parameter whose master has not changed stays.
        Needs `master_weights` to be outermost.
      seed: an integer, for the random bits of stochastic rounding.

    Returns:
      A transformation. `init(params)` gives a `MasterWeightsState`. `update(grads, state, params, **extra)`
      runs `inner` on float32 gradients and on the masters, and returns float32 updates with which
      `optax.apply_updates(params, updates)` gives the masters rounded to the parameters' dtypes, exactly
      unless a parameter shrinks by more than a factor of 2**12 (float16) or 2**15 (bfloat16) in one step;
      then within 2**-23 of the old parameter, where float32 itself rounds. (Of zeros the sign may differ. NaN
      and infinity plus an update stay what they are.) Float32 parameters have masters too, since
      inside `loss_scaled` all are passed as float32; float64, complex and integer leaves have none, and
      get the updates of `inner`.

    Raises:
      TypeError, ValueError: for an `inner` that is not a transformation; in `update` for the state of another
        one, and where `params` is missing; with stochastic rounding where no parameter is half.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = jnp.bfloat16(1.0)
      >>> def train(tx, params, steps):
      ...     state = tx.init(params)
      ...     for _ in range(steps):
      ...         updates, state = tx.update(jnp.bfloat16(-1.0), state, params)
      ...         params = optax.apply_updates(params, updates)
      ...     return float(params)
      >>> train(optax.sgd(2.0**-9), params, 64), train(master_weights(optax.sgd(2.0**-9)), params, 64)
      (1.0, 1.125)

    References:
      Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
    """
    if not isinstance(stochastic_rounding, bool):
        raise TypeError(f"stochastic_rounding must be True or False, got {stochastic_rounding!r}.")
    check_seed(seed)
    name = "master_weights"
    rules = _master, functools.partial(_current, stochastic=stochastic_rounding), _stepped
    random = (seed, f"{name}(..., stochastic_rounding=True)") if stochastic_rounding else ()
    return _training_half(inner, name, MasterWeightsState, "masters", *rules, *random)


def _has_master(p: Any) -> bool:
    return is_floating_array(p) and promote_dtype(p.dtype) == jnp.float32


def _master(p: Any) -> Any:
    if is_floating_array(p) and p.dtype.itemsize == 1:
        raise TypeError(
            f"master_weights keeps masters of float16 and bfloat16 parameters, got one in {p.dtype.name}: "
            "optax cannot add updates to 8 bits. Keep it in bfloat16, and cast it where it is used."
        )
    # A copy of float32 parameters too: states may be donated together with the parameters.
    return jnp.array(p, jnp.float32) if _has_master(p) else optax.MaskedNode()


def _current(p: Any, m: Any, stochastic: bool) -> Any:
    """The master, or the parameter where it is not the rounded master (it was changed outside)."""
    if not _has_master(p):
        return p
    if is_half_array(p) and stochastic:
        expected = rounded(m, p.dtype, TOWARDS_ZERO), rounded(m, p.dtype, AWAY_FROM_ZERO)
    elif is_half_array(p):
        expected = (rounded(m, p.dtype),)
    else:  # Float32 copies that loss_scaled passes of parameters of some half dtype, or float32 itself.
        expected = m, rounded(m, jnp.float16), rounded(m, jnp.bfloat16)
    p = jnp.asarray(p, jnp.float32)
    is_current = p == expected[0]
    for other in expected[1:]:
        is_current |= p == other
    return lax.select(is_current, m, p)


def _stepped(p: Any, old: Any, step: Any, master: Any, bits: Any) -> tuple[Any, Any]:
    """The update that takes a parameter to its new master, rounded to the parameter's dtype; the master."""
    if not _has_master(p):
        return step, master
    step, p32 = jnp.asarray(step, jnp.float32), jnp.asarray(p, jnp.float32)
    new = old + step
    if not is_half_array(p):
        # Where the parameter was the master itself, adding the step gives the new one to the last bit.
        return jnp.where(p32 == old, step, change(p32, new)), new
    if bits is None:
        return change(p32, rounded(new, p.dtype)), new
    return change(p32, jnp.where(new == old, p32, rounded(new, p.dtype, bits))), new


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      inner_state: state of the wrapped transformation.
      count: updates seen so far, int32 scalar, saturating; the random bits depend on it.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import stochastic_rounding
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
    check_seed(seed)
    name = "stochastic_rounding"
    rules = lambda p: None, lambda p, own: tree_to_float32(p), _randomly_rounded
    return _training_half(inner, name, StochasticRoundingState, "", *rules, seed=seed, needs_half=name)


def _randomly_rounded(p: Any, p32: Any, step: Any, own: Any, bits: Any) -> tuple[Any, None]:
    if not is_half_array(p):
        return step, None
    return change(p32, rounded(p32 + jnp.asarray(step, jnp.float32), p.dtype, bits)), None


class KahanSummationState(NamedTuple):
    """State of `kahan_summation`.

    Attributes:
      inner_state: state of the wrapped transformation.
      compensation: the rounding error to be added to the parameter, times 2**8 (bfloat16) or 2**11 (float16,
        in which it would otherwise be a subnormal number or 0); in the parameter's dtype.
        `optax.MaskedNode()` in the places of parameters that are not half.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import kahan_summation
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
      >>> for _ in range(64):
      ...     updates, state = tx.update(jnp.float16(-1.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params)
      1.0078125

    References:
      Kahan, "Further remarks on reducing truncation errors", CACM 1965; Zamirai et al., "Revisiting
      BFloat16 Training", 2020, section 4.
    """
    name, rules = "kahan_summation", (_no_compensation, _sum, _compensated)
    return _training_half(inner, name, KahanSummationState, "compensation", *rules, needs_half=name)


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


def _compensated(p: Any, _: Any, step: Any, compensation: Any, bits: None) -> tuple[Any, Any]:
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
