"""A loss traced as it would run in half precision, to be run in float32 with taps wherever it would round."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import calls, compat, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report.function import replaced
from jmp_policy._src.report.sensitivity.half_program import Loss, Places
from jmp_policy._src.report.sensitivity.rounding_taps import DTYPES
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


#: Decisions if their operands are half. In float32 most compare what is nowhere near equal: a variance with
#: 0, a random number with the rate of a dropout. So the absolute values of a float32 loss are not seen.
_COMPARISONS = HAVING[Trait.DECIDES]

#: Decisions in float32 too: a router of experts, max pooling.
_CHOICES = HAVING[Trait.RANKS]


def makes_decisions(jaxpr: Any) -> bool:
    """Whether a program decides anything that its results hang on by numbers that half rounds.

    There the gradient jumps, and has no derivative. A program is asked that computes a gradient: a maximum
    that only keeps an exponential from overflowing, as in a softmax, leaves no comparison in it; that of a
    relu does.
    """
    search = _Search()
    search.inputs_of(jaxpr, [True] * len(compat.open_jaxpr(jaxpr).outvars))
    return search.found


class _Search:
    """Search backward from the results: traced gradients hold much that no result needs.

    Attributes:
      found: whether there is a decision.
    """

    def __init__(self) -> None:
        self.found = False

    def inputs_of(self, jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
        """Returns which arguments of a jaxpr the wanted ones of its results need."""
        opened = compat.open_jaxpr(jaxpr)
        needed = set(_variables(itertools.compress(opened.outvars, wanted)))
        for eqn in reversed(opened.eqns):
            outs = [var in needed for var in eqn.outvars]
            if any(outs):
                self.found |= _decides(eqn)
                needed.update(_variables(self._operands(eqn, outs)))
        return [var in needed for var in opened.invars]

    def _operands(self, eqn: Any, outs: Sequence[bool]) -> Iterable[Any]:
        """Returns the operands that results of an operation need."""
        called = calls.called(eqn)
        if calls.kind_of(eqn) is Kind.CUSTOM_JVP:
            return eqn.invars  # Its derivative stands beside it: of softplus that is smooth.
        if called is not None:
            return itertools.compress(eqn.invars[called.skipped :], self.inputs_of(called.jaxpr, outs))
        for inner in ir.subjaxprs(eqn):
            self.inputs_of(inner, [True] * len(compat.open_jaxpr(inner).outvars))
        return eqn.invars


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, compat.Literal)]


def _decides(eqn: Any) -> bool:
    dtypes = list(map(ir.dtype_of, eqn.invars))
    if eqn.primitive.name in _COMPARISONS:
        return any(map(is_half, dtypes)) and not any(map(_is_infinite, eqn.invars))
    return eqn.primitive.name in _CHOICES and jnp.issubdtype(dtypes[0], jnp.floating)


def _is_infinite(atom: Any) -> bool:
    """Returns whether an operand is the number infinity, to which nothing is nearly equal."""
    return isinstance(atom, compat.Literal) and bool(np.all(np.isinf(np.asarray(atom.val, np.float32))))
