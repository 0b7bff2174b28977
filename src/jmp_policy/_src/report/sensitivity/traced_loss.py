"""A loss traced as it would run in half precision, to be run in float32 with taps wherever it would round."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report.function import replaced
from jmp_policy._src.report.sensitivity.decisions import makes_decisions
from jmp_policy._src.report.sensitivity.half_program import Loss, Places
from jmp_policy._src.report.sensitivity.rounding import DTYPES
from jmp_policy._src.report.sensitivity.tapped_program import Sink, TappedProgram, Taps


class TracedLoss(NamedTuple):
    """A loss with everything in half, traced and not run.

    Args:
      name: of the loss function.
      dtype: "float16" or "bfloat16".
      modules: those of the model, by the names that lead to them.
      jaxpr: the loss, of flat arrays.
      group_of: function from the names of scopes to the module that an operation in them belongs to.
      trained: which of the arrays are parameters.
      batches: the arrays, one list per batch.
      groups: the modules in which something is rounded.
      decides: whether the gradient hangs on decisions that rounding may turn.
    """

    name: str
    dtype: str
    modules: dict[tuple[str, ...], Any]
    jaxpr: Any
    group_of: Callable[[tuple[str, ...]], str | None]
    trained: Sequence[int]
    batches: Sequence[Sequence[Any]]
    groups: Sequence[str]
    decides: bool

    @property
    def sinks(self) -> list[Sink]:
        """Returns all that a tap can count for."""
        return [Sink(group, alone) for group in self.groups for alone in (False, True)]

    def params(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Returns the parameters among the arrays, in float32."""
        return [arrays[i].astype(jnp.float32) for i in self.trained]

    def run(
        self, taps: Taps, sinks: Mapping[Sink, Any], params: Sequence[Any], arrays: Sequence[Any]
    ) -> jax.Array:
        """Returns the loss, computed in float32 with taps."""
        program = TappedProgram(self.group_of, sinks, self.dtype, taps)
        return program(self.jaxpr, replaced(arrays, self.trained, params))[0].astype(jnp.float32)


def traced_loss(loss: Loss, dtype: str, batches: Sequence[tuple[Any, ...]], taps: Taps) -> TracedLoss:
    """Traces a loss with everything in half.

    Args:
      loss: the loss of the float32 model.
      dtype: "float16" or "bfloat16".
      batches: further values of its arguments.
      taps: any; it is run without sinks, to see what would be rounded.

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
    empty = TappedProgram(group_of, {}, dtype, taps)
    jax.eval_shape(lambda arrays: empty(jaxpr, arrays), function.arrays)
    if not empty.groups:
        raise ValueError(
            f"Nothing of {function.name} would be computed in {dtype}: it calls no module of Flax that "
            "computes in half under a policy, and has no matrix product for autocast. Give it the loss of "
            "the float32 model."
        )
    gradient, *arguments = half.gradient()
    decides = makes_decisions(jax.make_jaxpr(gradient)(*arguments))
    groups = list(empty.groups)
    return TracedLoss(function.name, dtype, modules, jaxpr, group_of, trained, given, groups, decides)


def compiled_quickly(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a jitted function that is run a few times: on a CPU, less optimised and sooner compiled."""
    quick: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(run, compiler_options=quick if jax.default_backend() == "cpu" else None)


def _check_shapes(given: Sequence[Sequence[Any]], use: str) -> None:
    shapes = [[(x.shape, str(x.dtype)) for x in arrays] for arrays in given]
    for batch in shapes[1:]:
        if batch != shapes[0]:
            raise ValueError(
                f"{use} compiles one program for all batches, so those in `batches` must have the shapes and "
                f"dtypes of the first; got {batch} after {shapes[0]}."
            )
