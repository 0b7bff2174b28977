"""Counts the magnitudes of gradients in a backward pass, to show where they vanish in half precision."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.classes import check_no_nnx_module
from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.core.pytree import pytree_dataclass, replace, static
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr.ir import is_array
from jmp_policy._src.loss_scaling.float8_state import next_histories
from jmp_policy._src.loss_scaling.float16_loss import first_cotangent
from jmp_policy._src.loss_scaling.loss_scale import restore_scale, scale_loss, split_loss
from jmp_policy._src.report import progress, tapping
from jmp_policy._src.report.function import Function, as_function, as_loss_scale, to_run
from jmp_policy._src.report.pieces import compiled_quickly
from jmp_policy._src.report.spectrum import histogram
from jmp_policy._src.report.spectrum.magnitudes import GradientSpectrum, magnitudes


def gradient_spectrum(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    scale: Any = 1.0,
    has_aux: bool = False,
    activations: bool = True,
    margin: int = 2,
    **kwargs: Any,
) -> GradientSpectrum:
    """Runs one backward pass and counts the magnitudes of gradients and activations.

    Pass the loss of the float32 model to see what float16 would lose; the loss of a float16 model, and the
    scale it is trained with, to see what it does lose. Runs on the device, compiled.

    Each call traces anew, since `loss_fn` may read values that have changed since the last one; what is equal
    is compiled once. To count over many steps, use `spectrum_value_and_grad` in the training step.

    Args:
      loss_fn: a loss function `(params, *args) -> scalar`; of NNX modules `(model, *args) -> scalar`.
      params: a pytree of arrays, or an NNX model.
      args, kwargs: the rest of its arguments.
      scale: factor on the loss: a number, a loss scale, or an optimizer state that holds one.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      activations: whether to count the outputs of Flax modules and of `jmp_policy.report.tap`, and their
        gradients, too: of those that depend on a parameter.
      margin: exponents by which the safe constant scale stays below overflow.

    Returns:
      A `GradientSpectrum`; `print` shows it, `.plot()` draws it.

    Raises:
      TypeError, ValueError: for a loss that is not a scalar, parameters without floating arrays, and losses
        whose differentiation taps on activations cannot follow.

    Example:
      >>> import jax.numpy as jnp
      >>> spectrum = gradient_spectrum(lambda w: (w * 2.0**-30).sum(), jnp.ones(4))
      >>> spectrum.overall().float16.zero, spectrum.overall().recovered(15)
      (1.0, 1.0)

    References:
      NVIDIA, "Training With Mixed Precision", SDK guide, section 3.1 (the histogram).
    """
    function = to_run(loss_fn, (params, *args), kwargs, "gradient_spectrum")
    loss_scale = as_loss_scale(scale)
    trained = function.trained_by("gradient_spectrum")

    params, names = [function.arrays[i] for i in trained], list[str]()
    try:
        with progress.showing("gradient_spectrum"):
            progress.step("compiling and running")
            names = _traced_taps(function) if activations else []
            counted = spectrum_value_and_grad(function.of_params, has_aux=has_aux)

            def run(scale: Any, state: SpectrumState, params: Any, arrays: Any) -> SpectrumState:
                return counted(scale, state, params, arrays)[1]

            state = SpectrumState.zeros(_trained_paths(function), names)
            state = compiled_quickly(run)(loss_scale, state, params, function.arrays)
    except (NotImplementedError, jax.errors.UnexpectedTracerError) as error:
        if not names:
            raise
        raise TypeError(
            f"{function.name} differentiates in a way that taps on activations cannot follow (jax.jvp, or a "
            "custom_vjp around modules). gradient_spectrum(..., activations=False) counts weights alone."
        ) from error
    return state.report(function.name, margin=margin)


def spectrum_value_and_grad(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Works as `scaled_value_and_grad`, and counts gradients and activations; for a jitted training step.

    Compile one step with it and one without, and run the one with it once in a while: the other steps then
    cost nothing more.

    Args:
      loss_fn: a loss function `(params, *args) -> scalar`, or `(loss, aux)` with `has_aux`.
      has_aux: as for `jax.value_and_grad`.

    Returns:
      A function `(scale_or_opt_state, state, params, *args) -> ((value, grads), state)`, where `state` is a
      `SpectrumState`; the gradients are scaled, as those of `scaled_value_and_grad`.

    Raises:
      TypeError: when `loss_fn` returns no scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss_fn(w): return (w**2).sum()
      >>> state = SpectrumState.create(jnp.ones(3))
      >>> (value, grads), state = spectrum_value_and_grad(loss_fn)(8.0, state, jnp.ones(3))
      >>> state.report().overall().exponents
      {1: 3}
    """

    @functools.wraps(loss_fn)
    def counted(
        scale_or_opt_state: Any, state: "SpectrumState", params: PyTree, *args: Any, **kwargs: Any
    ) -> Any:
        check_no_nnx_module("spectrum_value_and_grad", params)
        if not isinstance(state, SpectrumState):
            raise TypeError(
                "spectrum_value_and_grad counts into a SpectrumState, made by SpectrumState.create(params); "
                f"it got {type(state).__name__}."
            )
        scale = as_loss_scale(scale_or_opt_state)
        # What the backward pass starts with; `restore_scale` multiplies the gradients by the rest.
        out = jax.eval_shape(lambda p: split_loss(loss_fn(p, *args, **kwargs), has_aux)[0], params)
        cotangent = first_cotangent(getattr(out, "dtype", None), scale.loss_scale)

        def scaled(params: PyTree, sinks: dict[str, Any]) -> Any:
            taps = tapping.Taps(histogram.count, sinks, 1.0 / cotangent)
            with tapping.watching_modules(taps) if sinks else contextlib.nullcontext():
                loss, aux = split_loss(loss_fn(params, *args, **kwargs), has_aux)
            taps.done()
            return scale_loss(scale, loss), (loss, aux)

        sinks = {name: jnp.zeros((2, histogram.SIZE), jnp.float32) for name in state.activations}
        gradient = jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True, allow_int=True)
        (_, (loss, aux)), (grads, seen) = gradient(params, sinks)
        grads = restore_scale(scale, loss, next_histories(grads, params))
        state = state.update(grads, scale, activations=seen)
        return ((loss, aux) if has_aux else loss, grads), state

    return counted


@pytree_dataclass
class SpectrumState:
    """Counts of gradients' magnitudes that add up over steps, inside `jax.jit`.

    Args:
      names: names of the parameters, in the order of their tree; static.
      gradients: per parameter a vector of counts; float32.
      largest: per parameter the largest finite magnitude, unscaled; float32 scalar.
      activations: by tap, counts forward and backward; float32 [2, counts].
      loss_scale: loss scale of the last step that was counted; float32 scalar.
      calls: number of calls of `update`; int32 scalar, saturating.
      steps: number of these calls that were counted; int32 scalar, saturating.

    Example:
      >>> import jax.numpy as jnp
      >>> state = SpectrumState.create(jnp.ones(3)).update(jnp.array([1.0, 2.0, 0.0]))
      >>> int(state.steps), state.report().overall().zeros
      (1, 1)
    """

    names: tuple[str, ...] = static()
    gradients: tuple[jax.Array, ...]
    largest: tuple[jax.Array, ...]
    activations: dict[str, jax.Array]
    loss_scale: jax.Array
    calls: jax.Array
    steps: jax.Array

    @classmethod
    def create(
        cls, params: PyTree, loss_fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any
    ) -> "SpectrumState":
        """Makes the state in which nothing has been counted.

        Args:
          params: the parameters, whose gradients are to be counted; an NNX model for those of its Params.
          loss_fn, args, kwargs: to count activations too, the loss function, which is traced, and its
            arguments after `params`.
        """
        fn = loss_fn or (lambda params: None)
        function = as_function(fn, (params, *args), kwargs, "SpectrumState.create")
        return cls.zeros(_trained_paths(function), [] if loss_fn is None else _traced_taps(function))

    @classmethod
    def zeros(cls, paths: Sequence[str], taps: Any = ()) -> "SpectrumState":
        """Makes the state in which nothing has been counted, for parameters and taps of these names."""

        def empty(*shape: int) -> jax.Array:
            return jnp.zeros((*shape, histogram.SIZE), jnp.float32)

        return cls(
            names=tuple(paths),
            gradients=tuple(empty() for _ in paths),
            largest=tuple(jnp.zeros((), jnp.float32) for _ in paths),
            activations={name: empty(2) for name in taps},
            loss_scale=jnp.ones((), jnp.float32),
            calls=jnp.zeros((), jnp.int32),
            steps=jnp.zeros((), jnp.int32),
        )

    def update(
        self, grads: PyTree, scale: Any = 1.0, *, activations: dict[str, Any] | None = None, every: int = 1
    ) -> "SpectrumState":
        """Counts the gradients of one step, and returns the new state.

        Args:
          grads: gradients as `scaled_value_and_grad` returns them: multiplied by the loss scale.
          scale: the factor on them: a number, a loss scale, or an optimizer state that holds a loss scale.
          activations: counts of taps, as `spectrum_value_and_grad` passes them.
          every: count one call of this many, the first included. The counting is then in a branch, which
            costs little time in other steps but keeps the gradients in memory; a second step, compiled
            without it, has no such cost.

        Raises:
          ValueError: when the state was made for other parameters.
        """
        count = functools.partial(self._counted, grads, scale, activations)
        counted = count() if every == 1 else lax.cond(self.calls % every == 0, count, lambda: self)
        return replace(counted, calls=_increment(self.calls))

    def _counted(self, grads: PyTree, scale: Any, activations: dict[str, Any] | None) -> "SpectrumState":
        loss_scale = jnp.asarray(as_loss_scale(scale).loss_scale, jnp.float32)
        leaves = [leaf for leaf in jax.tree.leaves(grads) if is_array(leaf) and is_floating(leaf.dtype)]
        if len(leaves) != len(self.gradients):
            raise ValueError(
                f"The gradients have {len(leaves)} floating arrays and the spectrum was made for "
                f"{len(self.gradients)} parameters. Make it with SpectrumState.create(params)."
            )
        gradients, largest = [], []
        for counts, most, grad in zip(self.gradients, self.largest, leaves, strict=True):
            gradients.append(counts + histogram.count(grad, 1.0 / loss_scale))
            magnitude = jnp.abs(grad.astype(jnp.float32)) / loss_scale
            finite = jnp.max(magnitude, initial=0.0, where=jnp.isfinite(magnitude))
            largest.append(jnp.maximum(most, finite))
        new = activations or {}
        taps = {name: counts + new.get(name, 0.0) for name, counts in self.activations.items()}
        return replace(
            self,
            gradients=tuple(gradients),
            largest=tuple(largest),
            activations=taps,
            loss_scale=loss_scale,
            steps=_increment(self.steps),
        )

    def report(self, name: str = "the loss", margin: int = 2) -> GradientSpectrum:
        """Reports everything counted so far, on the host.

        Args:
          name: name of the function in the report.
          margin: exponents by which the safe constant scale stays below overflow.
        """
        if margin < 0:
            raise ValueError(f"margin is how far the scale stays below overflow: 0 or more, got {margin!r}.")
        state = jax.device_get(self)
        rows = [
            magnitudes(path, "weight gradient", counts, float(largest))
            for path, counts, largest in zip(state.names, state.gradients, state.largest, strict=True)
        ]
        for kind, place in (("activation gradient", 1), ("activation", 0)):
            for path, counts in state.activations.items():
                rows.append(magnitudes(path, kind, counts[place], None))
        return GradientSpectrum(name, float(state.loss_scale), tuple(rows), int(state.steps), margin)


def _increment(count: jax.Array) -> jax.Array:
    return jnp.minimum(count, np.iinfo(np.int32).max - 1) + 1


def _traced_taps(function: Function) -> list[str]:
    """The names of taps that parameters lead to.

    Training computes no gradients of other activations, and their size would say nothing of a loss scale.
    """
    taps, trained = tapping.Taps(histogram.count), function.trained()

    def traced(arrays: Sequence[Any]) -> Any:
        def run(params: Any) -> tuple[()]:
            function.of_params(params, arrays)
            return ()  # What is beside the loss may be no array.

        return jax.vjp(run, [arrays[i] for i in trained])[0]

    with tapping.watching_modules(taps):
        jax.eval_shape(traced, function.arrays)
    return list(taps.met)


def _trained_paths(function: Function) -> list[str]:
    """The paths of the parameters, without the argument's name."""
    paths = [function.arguments[i].path for i in function.trained()]
    return [path.partition("/")[2] or path for path in paths]
