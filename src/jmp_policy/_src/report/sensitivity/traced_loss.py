"""A loss traced as it would run in half precision, with the module that each operation belongs to."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jmp_policy._src.autocast.api import autocast
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import Walk
from jmp_policy._src.loss_scaling.loss_scale import split_loss
from jmp_policy._src.policy import half_errors
from jmp_policy._src.policy.frameworks import framework_of, imported_frameworks
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.policy.scope import ACTIVE, Scope
from jmp_policy._src.report import tapping
from jmp_policy._src.report.audit import audit_of
from jmp_policy._src.report.audit_findings import Product
from jmp_policy._src.report.function import Function, replaced, to_run
from jmp_policy._src.report.lost_constants import (
    LostConstants,
    WideNumbers,
    wide_numbers,
    without_overflow_warnings,
)
from jmp_policy._src.report.sensitivity.tapped_program import Sink, TappedProgram


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A loss function and its arguments. It is traced once, and once under each of the rules asked about.

    Args:
      call: `(params, *args, **kwargs) -> scalar`, or `(scalar, aux)`.
      params: a pytree of arrays, or an NNX model.
      args, kwargs: the rest of its arguments.
      has_aux: whether it returns a pair.
      use: the name of the report, for messages.
      rules: those under which its modules are; None without.
    """

    call: Callable[..., Any]
    params: PyTree
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    has_aux: bool
    use: str
    rules: PolicyMap | None = None
    _known: dict[PolicyMap, "Loss"] = dataclasses.field(default_factory=dict, init=False)

    def with_batch(self, batch: Sequence[Any]) -> "Loss":
        """The same with other values of its arguments; raises TypeError for what is no tuple or list."""
        if not isinstance(batch, tuple | list):
            raise TypeError(
                f"{self.use}'s batches are tuples of what the loss takes after the parameters: "
                f"batches=[(x, y), ...]; one is of type {type(batch).__name__}."
            )
        return dataclasses.replace(self, args=tuple(batch))

    @functools.cached_property
    def function(self) -> Function:
        """The same as a function of arrays that gives the loss alone."""
        if not callable(self.call):
            return to_run(self.call, (self.params, *self.args), dict(self.kwargs), self.use)  # Says so.

        @functools.wraps(self.call)
        def loss(*args: Any, **kwargs: Any) -> Any:
            return split_loss(self.call(*args, **kwargs), self.has_aux)[0]

        return to_run(loss, (self.params, *self.args), dict(self.kwargs), self.use)

    @functools.cached_property
    def trained(self) -> list[int]:
        """Which of the function's arrays are parameters; raises ValueError when there are none."""
        return self.function.trained_by(self.use)

    @functools.cached_property
    def _traced(self) -> tuple[Any, list[tuple[tapping.Call, Scope | None]]]:
        """The jaxpr, and the calls of modules, each with the policy that was active in Flax Linen."""
        watcher, function = tapping.Calls(lambda module: ACTIVE.value), self.function
        with tapping.watching_modules(watcher), without_overflow_warnings():
            jaxpr = jax.make_jaxpr(lambda arrays: function.result(arrays))(function.arrays)
        return jaxpr, watcher.calls

    @property
    def jaxpr(self) -> Any:
        """The loss, as a closed jaxpr of the function's arrays."""
        return self._traced[0]

    @contextlib.contextmanager
    def differentiated(self) -> Iterator[None]:
        """Makes the rules active as they are inside of the model, for what runs the jaxpr once more.

        JAX traces the rules of a custom_vjp, and the modules that they call, not before it is differentiated.
        """
        scopes = (scope for _, scope in self._traced[1] if scope is not None and scope.caller is not None)
        with contextlib.ExitStack() as stack:
            if self.rules is not None and (scope := next(scopes, None)) is not None:
                for framework in imported_frameworks():
                    stack.enter_context(framework.governing(self.rules))
                stack.enter_context(ACTIVE(scope))
            yield

    @functools.cached_property
    def modules(self) -> dict[tuple[str, ...], Any]:
        """The modules that it calls, by the names that lead to them: the model's class first."""
        # Some modules are only containers of those that run.
        found: dict[tuple[str, ...], Any] = {}
        for call, _ in self._traced[1]:
            names = tapping.plain_names([call.name])
            for end in range(1, len(names)):
                found.setdefault(names[:end], None)
            found[names] = call.module
        return found

    def under(self, rules: PolicyMap) -> "Loss":
        """The loss whose modules are governed by rules; a function without modules under autocast."""
        if rules not in self._known:
            self._known[rules] = self._under(rules)
        return self._known[rules]

    def _under(self, rules: PolicyMap) -> "Loss":
        if not self._traced[1]:
            return dataclasses.replace(self, call=autocast(self.call, rules))
        arguments, is_model = (self.args, dict(self.kwargs)), lambda value: framework_of(value) is not None
        trained, others = (jax.tree.leaves(x, is_leaf=is_model) for x in (self.params, arguments))
        given = [*trained, *others]
        for call, scope in self._traced[1]:
            framework = framework_of(call.module)
            policy = (framework and framework.policy_of(call.module)) or (scope and scope.rules)
            if policy:
                raise ValueError(
                    f"{self.use} puts the float32 model under its own policies, and {call.name} is wrapped: "
                    f"it stays under {policy!r}. Call the model as it was before `wrap` in the loss."
                )
            if framework is not None and framework.holds_arrays and not any(map(framework_of, given)):
                raise ValueError(
                    f"{self.use} puts the modules among its arguments under policies, and {call.name} "
                    f"is made inside. Give it the model: {self.use}(lambda model, ...: ..., model, ...)."
                )

        @functools.wraps(self.call)
        def governed(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for framework in imported_frameworks():
                    stack.enter_context(framework.governing(rules))
                return self.call(*args, **kwargs)

        def wrapped(value: Any) -> Any:
            framework = framework_of(value)
            if framework is None or not framework.holds_arrays:
                return value
            if not framework.has_half_params(value):
                return framework.wrap(value, rules)
            if all(value is not model for model in trained):
                return value  # It is frozen.
            raise ValueError(
                f"{self.use} needs a model in float32, and {type(value).__name__} has half parameters. Give "
                "it a copy: jmp_policy.nnx.cast_params(nnx.clone(model), 'float32')."
            )

        params, (args, kwargs) = jax.tree.map(wrapped, (self.params, arguments), is_leaf=is_model)
        return dataclasses.replace(self, call=governed, params=params, args=args, kwargs=kwargs, rules=rules)

    @functools.cached_property
    def gradient(self) -> Any:
        """The gradient by the parameters, and the loss: a jaxpr of the arrays and the loss scale."""
        run = jaxpr_as_fun(self.jaxpr)

        def gradient(arrays: Sequence[Any], scale: Any) -> Any:
            def loss_of(params: Sequence[Any]) -> Any:
                loss = run(*replaced(arrays, self.trained, params))[0]
                return loss.astype(jnp.float32) * scale, loss

            return jax.grad(loss_of, has_aux=True)([arrays[i] for i in self.trained])

        with self.differentiated(), without_overflow_warnings():
            return jax.make_jaxpr(gradient)(self.function.arrays, jnp.float32(1))

    @functools.cached_property
    def products(self) -> Sequence[Product]:
        """The products of the loss and its gradient."""
        names = [""] * (len(self.function.arrays) + 1)
        return audit_of(self.function.name, self.gradient, names).products


def module_of(modules: Mapping[tuple[str, ...], Any]) -> Callable[[tuple[str, ...]], str | None]:
    """A function from the scopes of an operation to the path of its module; None for what no module does.

    Args:
      modules: as `Loss.modules` has them; without any the names of the scopes count.
    """

    @functools.cache
    def path(scopes: tuple[str, ...]) -> str | None:
        if not modules:
            return "/".join(scopes)
        found: tuple[str, ...] = ()
        for name in tapping.plain_names(scopes):
            # A module that was handed to the one that calls it (the cell of an `nn.RNN`) belongs where it was
            # made. Other scopes in the code of a module are none.
            starts = (found[:end] for end in range(len(found), -1, -1))
            found = next((module for s in starts if (module := (*s, name)) in modules), found)
        return "/".join(found[1:]) if found else None

    return path


def is_below(path: str, above: str) -> bool:
    """Whether a path is another one, or below it."""
    return not above or path == above or path.startswith(above + "/")


DTYPES = ("float16", "bfloat16")


class TracedLoss:
    """A loss with everything in half that can be, traced and not run.

    Args:
      loss: the loss of the float32 model.
      dtype: "float16" or "bfloat16".
      batches: further values of its arguments.

    Attributes:
      name: of the loss function.
      modules: those of the model, by the names that lead to them.
      jaxpr: the loss, of flat arrays.
      trained: which of the arrays are parameters.
      batches: the arrays, one list per batch.
      in_float32: the modules whose own operations JAX cannot compute in half.
      groups: the modules in which something is rounded, and those.

    Raises:
      ValueError: where nothing would be computed in half; for batches of other shapes.
    """

    def __init__(self, loss: Loss, dtype: str, batches: Sequence[tuple[Any, ...]]):
        if dtype not in DTYPES:
            raise ValueError(f"{loss.use} looks at float16 and bfloat16, got dtype={dtype!r}.")
        policy = f"params=float32, compute={dtype}, output=float32"
        self.in_float32 = _not_half(loss, PolicyMap(policy))
        self._half = half = loss.under(_rules_around(self.in_float32, list(loss.modules), policy))
        others = (half.with_batch(batch).function.arrays for batch in batches)
        self.name, self.dtype, self.modules = half.function.name, dtype, loss.modules
        self.jaxpr, self.trained, self.batches = half.jaxpr, half.trained, [half.function.arrays, *others]
        first, *shapes = ([(x.shape, str(x.dtype)) for x in arrays] for arrays in self.batches)
        if other := next((batch for batch in shapes if batch != first), None):
            raise ValueError(
                f"{loss.use} compiles one program for all batches, so those in `batches` must have the "
                f"shapes and dtypes of the first; got {other} after {first}."
            )
        self._group_of = module_of(loss.modules)
        untapped = TappedProgram(self._group_of, {}, dtype)
        jax.eval_shape(lambda arrays: untapped(half.jaxpr, arrays), half.function.arrays)
        if not untapped.groups:
            raise ValueError(
                f"Nothing of {self.name} would be computed in {dtype} that can be measured: outside of "
                "functions with a derivative of their own (custom_vjp, lax.custom_root, odeint) it has no "
                "module of Flax that computes in half under a policy, and no matrix product for autocast. "
                "Give it the loss of the float32 model."
            )
        self.groups = list(dict.fromkeys([*untapped.groups, *self.in_float32]))

        def in_float32() -> WideNumbers:
            return wide_numbers(half.jaxpr, loss.under(PolicyMap("float32")).jaxpr)

        self._written = LostConstants(Walk(half.jaxpr).operations, in_float32).numbers

    @property
    def sinks(self) -> list[Sink]:
        """All that a tap can count for."""
        return [Sink(group, alone) for group in self.groups for alone in (False, True)]

    def params(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """The parameters among the arrays, in float32."""
        return [arrays[i].astype(jnp.float32) for i in self.trained]

    def run(self, sinks: Mapping[Sink, Any], params: Sequence[Any], arrays: Sequence[Any]) -> jax.Array:
        """The loss, computed in float32 with taps."""
        program = TappedProgram(self._group_of, sinks, self.dtype, self._written)
        with self._half.differentiated():
            return program(self.jaxpr, replaced(arrays, self.trained, params))[0].astype(jnp.float32)


def _not_half(loss: Loss, rules: PolicyMap) -> tuple[str, ...]:
    """The paths of the modules that cannot follow rules in half: Fourier transforms, linear algebra.

    JAX refuses some of these operations when they are traced, and then every one of them counts; others not
    before they are compiled.
    """
    try:
        jaxpr, given_half = loss.under(rules).jaxpr, True
    except half_errors.KINDS:
        jaxpr, given_half = loss.jaxpr, False
    path_of = module_of(loss.modules)
    paths = [
        path_of((site.path,))
        for eqn, site, *_ in Walk(jaxpr).operations
        if eqn.primitive.name in _NOT_HALF
        if not given_half or any(map(is_half, map(ir.dtype_of, eqn.invars)))
    ]
    return tuple(path for path in dict.fromkeys(paths) if path is not None) if loss.modules else ()


def _rules_around(wide: Sequence[str], modules: Sequence[tuple[str, ...]], policy: str) -> PolicyMap:
    """A policy for all but some modules, whose own operations are float32."""
    paths = ["/".join(names[1:]) for names in modules]
    rules = [(path, "float32") for path in wide if path]
    above = [path for path in wide if any(path != below and is_below(below, path) for below in paths)]
    globs = [(f"{path}/*" if path else "*", policy) for path in above]
    return PolicyMap("float32" if "" in wide else policy, [*rules, *globs])


_NOT_HALF = HAVING[Trait.NOT_HALF]
