"""Runs the gradient of a loss with taps, and the backward pass of its product with random vectors."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report.function import replaced
from jmp_policy._src.report.sensitivity.half_program import Loss, Places
from jmp_policy._src.report.sensitivity.rounding import DTYPES
from jmp_policy._src.report.sensitivity.rounding_taps import STATISTICS, sink
from jmp_policy._src.report.sensitivity.tapped_program import Sink, TappedProgram

#: The largest loss scale that is proposed.
_LARGEST_SCALE = 2.0**24


class Effect(NamedTuple):
    """What rounding to half does.

    Args:
      gradient, loss: squares of their relative errors, in the mean.
      overflow, underflow: number of values that become infinite and zero.
      gradient_overflow, gradient_underflow: the same of cotangents times the loss scale.
    """

    gradient: float = 0.0
    loss: float = 0.0
    overflow: int = 0
    underflow: int = 0
    gradient_overflow: int = 0
    gradient_underflow: int = 0

    def __add__(self, other: Any) -> "Effect":
        return Effect(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def error(self) -> float:
        """Returns the relative error of the gradient; infinite where something overflows."""
        return math.inf if self.overflow or self.gradient_overflow else math.sqrt(self.gradient)


class Effects(NamedTuple):
    """What rounding does, by the module that rounds.

    Args:
      name: of the loss function.
      dtype: "float16" or "bfloat16".
      loss_scale: what the cotangents were multiplied by.
      modules: those of the model, by the names that lead to them.
      own: of what a module rounds, whatever other modules do.
      alone: of what it rounds besides if all others compute in float32.
    """

    name: str
    dtype: str
    loss_scale: float
    modules: dict[tuple[str, ...], Any]
    own: dict[str, Effect]
    alone: dict[str, Effect]


def effects(loss: Loss, dtype: str, batches: Sequence[tuple[Any, ...]], probes: int) -> Effects:
    """Measures what rounding does to a loss and its gradient.

    Raises:
      ValueError: where nothing would be computed in half; for batches of other shapes.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{loss.use} looks at float16 and bfloat16, got dtype={dtype!r}.")
    modules = loss.modules()
    half = loss.under(PolicyMap(f"params=float32, compute={dtype}, output=float32"))
    function, trained = half.function(), half.trained()
    given = [function.arrays, *(half._replace(args=tuple(b)).function().arrays for b in batches)]
    _check_shapes(given, loss.use)
    jaxpr, group_of = jax.make_jaxpr(function.result)(function.arrays), Places(modules).of
    empty = TappedProgram(group_of, {}, dtype)
    jax.eval_shape(lambda arrays: empty(jaxpr, arrays), function.arrays)
    if not empty.groups:
        raise ValueError(
            f"Nothing of {function.name} would be computed in {dtype}: it calls no module of Flax that "
            "computes in half under a policy, and has no matrix product for autocast. Give it the loss of "
            "the float32 model."
        )
    sinks = [Sink(group, alone) for group in empty.groups for alone in (False, True)]
    run = _compiled(
        lambda sinks, arrays: TappedProgram(group_of, sinks, dtype)(jaxpr, arrays)[0], trained, sinks
    )
    scale = 1.0  # bfloat16 has float32's range.
    if dtype == "float16":
        scale = _loss_scale(run(jax.random.key(0), 1.0, given[0]).first)
    found = dict.fromkeys(sinks, Effect())
    for i, arrays in enumerate(given):
        for j in range(probes):
            seen = jax.device_get(run(jax.random.key(i * probes + j + 1), scale, arrays))
            # Counts are those of one batch; squares are means.
            for name in sinks:
                found[name] += _effect(seen, name, probes * len(given), counted=not i and not j)
    own, alone = ({g: found[Sink(g, which)] for g in empty.groups} for which in (False, True))
    return Effects(function.name, dtype, scale, modules, own, alone)


class _Seen(NamedTuple):
    """Cotangents of the sinks, the loss, and the square of the gradient's norm."""

    first: Any
    second: Any
    loss: Any
    square: Any


def _compiled(
    loss_of: Callable[..., Any], trained: Sequence[int], names: Sequence[Sink]
) -> Callable[..., Any]:
    def of_params(params: Sequence[Any], sinks: Any, arrays: Sequence[Any]) -> Any:
        return loss_of(sinks, replaced(arrays, trained, params)).astype(jnp.float32)

    def run(key: Any, scale: Any, arrays: Sequence[Any]) -> _Seen:
        params = [arrays[i].astype(jnp.float32) for i in trained]
        signs = [
            jax.random.rademacher(jax.random.fold_in(key, i), param.shape, jnp.float32)
            for i, param in enumerate(params)
        ]

        def along(sinks: Any) -> Any:
            # Of the sinks too: cotangents are wanted where no parameter leads to, at the inputs.
            gradient = jax.value_and_grad(of_params, (0, 1))
            loss, (grads, first) = gradient(params, sinks, arrays)
            product = sum(jnp.sum(a * b) for a, b in zip(signs, grads, strict=True))
            return product, _Seen(first, None, loss, sum(jnp.sum(jnp.square(g)) for g in grads))

        second, seen = jax.grad(along, has_aux=True)({name: sink(scale) for name in names})
        return seen._replace(second=second)

    # The program runs a few times. On a CPU, code that is not optimised is compiled in half of the time.
    quick: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(run, compiler_options=quick if jax.default_backend() == "cpu" else None)


def _loss_scale(first: Any) -> float:
    """Returns the power of two by which the largest cotangent stays a factor of 4 below overflow; at least 1.

    Modules whose cotangents leave no room at all are left out: a scale below 1 would make those of all others
    zero for their sake.
    """
    place, most = STATISTICS.index("largest_gradient"), 65504 / 4
    found = (float(statistics[place]) for statistics in first.values())
    largest = max((x for x in found if x <= most), default=0.0)
    return min(2.0 ** math.floor(math.log2(most / largest)), _LARGEST_SCALE) if largest else 1.0


def _effect(seen: _Seen, name: Sink, runs: int, counted: bool) -> Effect:
    statistics: dict[str, Any] = dict(zip(STATISTICS, seen.first[name], strict=True))
    counts = [int(statistics[field]) if counted else 0 for field in Effect._fields[2:]]
    square, loss = float(seen.square), float(np.square(seen.loss))
    gradient = float(seen.second[name][0]) / square if square else 0.0
    return Effect(gradient / runs, float(statistics["loss_variance"]) / loss / runs if loss else 0.0, *counts)


def _check_shapes(given: Sequence[Sequence[Any]], use: str) -> None:
    shapes = [[(x.shape, str(x.dtype)) for x in arrays] for arrays in given]
    for batch in shapes[1:]:
        if batch != shapes[0]:
            raise ValueError(
                f"{use} compiles one program for all batches, so those in `batches` must have the shapes and "
                f"dtypes of the first; got {batch} after {shapes[0]}."
            )
