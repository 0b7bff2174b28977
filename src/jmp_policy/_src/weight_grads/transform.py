"""Runs a program so that the gradients of its parameters are float32: each weight is carried as two values.

A half product hands its weight gradient on in half, and a sum of such gradients (over a batch, the rows of a
look-up, the steps of a loop, the devices of a mesh) is a sum in half. So beside the half value of a weight
goes the float32 parameter that it was cast from, through the same reshapes, slices and masks, into loops and
calls. For::

    w16 = w.astype(float16)         # DualWeight(value=w16, fp32=w)
    v16 = w16.T                     # DualWeight(value=w16.T, fp32=w.T)
    y = x @ v16                     # Activation(x @ v16); its gradient by the weight goes to w.T, in float32

values are those of the program as it was traced. Nobody reads the float32 twin, and the compiler drops it;
but the gradient takes its way, and is summed in float32. Where a weight meets an activation, what comes of it
is an activation.

Products get derivatives of their own. Forward, and for the other operands, nothing differs from the operation
as it was traced. The product that gives a weight's gradient has half operands too, and returns what it
accumulated in float32 anyway.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.jaxpr import calls, compat, control_flow, ir, op_table, source_lines
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.interpreter import Carries, Interpreter
from jmp_policy._src.jaxpr.ir import FLOAT32, flattened
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.products import binding
from jmp_policy._src.weight_grads.param_casts import TRACED_FOR_IT, is_param_cast

#: "whole": a parameter, or what was made of parameters alone. "rows": looked up in one. "copies": of one.
WeightKind: TypeAlias = Literal["whole", "rows", "copies"]

#: Of one array that may be a weight, and of others that are none.
_MOVES = HAVING[Trait.KEEPS_WEIGHT]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DualWeight:
    """A value made of parameters, as the program has it.

    Args:
      value: half (or float32, where the program casts back), without a gradient.
      fp32: the same in float32, from float32 parameters: the way of the gradient.
      kind: rows and copies are activations where they meet a weight in a product.
    """

    value: Any
    fp32: Any
    kind: WeightKind = dataclasses.field(default="whole", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Activation:
    """A value that a weight had a part in, and that is no weight itself."""

    value: Any


def read(value: Any) -> Any:
    """A value as the program has it, with its gradient."""
    if isinstance(value, DualWeight):
        return as_cast_of(value.value, value.fp32)
    return value.value if isinstance(value, Activation) else value


class DualValues(Interpreter):
    """Runs a program on arrays, weights and activations, each of which is one of them.

    Attributes:
      missed: where a weight gradient stays half, and why.
    """

    def __init__(self) -> None:
        self.missed: dict[str, str] = {}

    def results(self, jaxpr: Any, values: Sequence[Any], where: Any) -> list[Any]:
        """The results of a jaxpr, of arrays, weights and activations, as arrays."""
        return list(map(read, self.run(jaxpr, values, where)))

    def inside(self, jaxpr: Any, take: Callable[[], list[Any]], where: Any) -> tuple[list[Any], Any]:
        """Runs the body of a loop, branch or call; what leaves it is an activation."""
        with binding.program(is_body=True):
            return _activations(self.results(jaxpr, take(), where)), ()

    def at(self, eqn: Any, around: Any) -> bool:
        """Whether the first named scope of all operations is left out: of the outermost jaxpr alone."""
        return False

    def context(self, eqn: Any, around: Any) -> Any:
        """The scopes of an operation, without that which marks the cast of a parameter."""
        last = -1 if is_param_cast(eqn) else None
        return compat.eqn_context(eqn, compat.stack_within(eqn, int(around), last))

    def bind(self, eqn: Any, *arrays: Any, **changed: Any) -> list[Any]:
        """Does an operation itself."""
        return binding.bind(eqn, *arrays, **changed)

    def carries(self, eqn: Any, loop: control_flow.Loop, where: Any) -> Carries:
        """Carries are activations: a weight that changes from trip to trip is none."""
        return Carries(_activations(map(read, loop.start)))

    def cond(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Runs a branch for an index, which may be an activation."""
        return super().cond(eqn, [read(values[0]), *values[1:]], where)

    def enters(self, eqn: Any, kind: Kind, values: list[Any]) -> bool:
        """Whether a call or loop is run: with a weight outside or inside, and if it can be rebuilt."""
        if not self._concerns(eqn, values):
            return False
        return kind in _ENTERED and not calls.is_bound(eqn)

    def operation(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Does an operation that takes weights by a rule, and any other as it was traced."""
        if is_param_cast(eqn):
            return [_cast(eqn, values[0])]
        kind = calls.kind_of(eqn)
        if kind is not None and self._concerns(eqn, values):
            return self._closed_call(eqn, kind, values)
        weights = [value for value in values if isinstance(value, DualWeight)]
        if weights:
            return _RULES.get(eqn.primitive.name, _with_weights)(eqn, values, weights)
        outs = binding.bind(eqn, *map(read, values))
        is_active = self._is_marked(eqn) or any(isinstance(value, Activation) for value in values)
        return _activations(outs) if is_active else outs

    def _closed_call(self, eqn: Any, kind: Kind, values: list[Any]) -> list[Any]:
        """Does a call that is not run operation by operation."""
        if kind is not Kind.WHILE:
            name = eqn.primitive.name
            is_jit = name == "jit"
            why = "which is bound to its shardings or donations" if is_jit else "whose derivative is given"
            line = source_lines.source_line(eqn) or "an unknown line"
            self.missed.setdefault(line, f"the weight goes into a {name}, {why}")
        return _activations(binding.bind(eqn, *map(read, values)))

    def _concerns(self, eqn: Any, values: Sequence[Any]) -> bool:
        return any(isinstance(value, DualWeight) for value in values) or self._is_marked(eqn)

    def _is_marked(self, eqn: Any) -> bool:
        """Whether a parameter is cast inside a call or loop."""
        return any(is_param_cast(inner) for jaxpr in ir.subjaxprs(eqn) for inner in ir.equations(jaxpr))


#: Calls and loops that are run operation by operation. The others bring their own derivative, have none, or
#: cannot be rebuilt.
_ENTERED = (Kind.JIT, Kind.CALL, Kind.CHECKPOINT, Kind.SHARD_MAP, Kind.SCAN, Kind.COND)


def _activations(values: Iterable[Any]) -> list[Any]:
    return list(map(Activation, values))


def _cast(eqn: Any, value: Any) -> DualWeight:
    """Casts a parameter to half, and keeps the float32 value beside it."""
    fp32 = read(value)
    value = binding.bind(eqn, lax.stop_gradient(fp32))[0]
    return DualWeight(value, lax.convert_element_type(fp32, FLOAT32))


def _value(value: Any) -> Any:
    """A value without its gradient, where it is a weight."""
    return value.value if isinstance(value, DualWeight) else read(value)


def _makes_weights(eqn: Any, operands: Sequence[Any], weights: Sequence[DualWeight]) -> bool:
    """Whether an operation makes a weight: of whole ones alone, with masks and numbers too.

    Of rows it makes activations, whose gradients are as large: as weights they would be needed in float32 as
    well, and the table gathered from its devices in both types.
    """
    if ir.holds_jaxpr(eqn) or not all(is_floating(ir.dtype_of(var)) for var in eqn.outvars):
        return False
    if any(isinstance(value, Activation) for value in operands):
        return False
    # An array that is larger than the weight is no mask of it: `x + bias`, of what a model is given.
    is_larger = eqn.outvars[0].aval.size > max(weight.value.size for weight in weights)
    if is_larger and eqn.primitive.name in op_table.BROADCASTING and len(weights) < len(operands):
        return False
    return all(weight.kind == "whole" for weight in weights)


def _bound_to_both(eqn: Any, values: Iterable[Any], fp32: Iterable[Any], kind: WeightKind) -> list[Any]:
    """Does an operation as it was traced, without a gradient, and in float32 for the gradient."""
    both = zip(binding.bind(eqn, *values), binding.bind(eqn, *fp32), strict=True)
    return [DualWeight(value, fp32, kind) for value, fp32 in both]


def _fp32_of(value: Any) -> Any:
    if isinstance(value, DualWeight):
        return value.fp32
    return lax.convert_element_type(value, FLOAT32) if is_floating(getattr(value, "dtype", None)) else value


def _moved(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    kind: WeightKind = operands[0].kind
    if eqn.primitive.name == "gather":
        kind = "rows"
    elif kind == "whole" and eqn.outvars[0].aval.size > eqn.invars[0].aval.size:
        kind = "copies"
    return _bound_to_both(eqn, map(_value, operands), [operands[0].fp32, *map(read, operands[1:])], kind)


def _with_weights(eqn: Any, operands: Sequence[Any], weights: Sequence[DualWeight]) -> Sequence[Any]:
    """Does an operation of weights that has no rule of its own.

    What moves one weight moves both of its values. What computes with weights alone computes with both. What
    is computed with an activation is one.
    """
    if eqn.primitive.name in _MOVES and operands[0] is weights[0] and len(weights) == 1:
        return _moved(eqn, operands)
    if _makes_weights(eqn, operands, weights):
        values = [lax.stop_gradient(_value(value)) for value in operands]
        return _bound_to_both(eqn, values, map(_fp32_of, operands), "whole")
    if eqn.primitive.name in op_table.BROADCASTING:
        operands = [_broadcast(value, eqn.outvars[0]) for value in operands]
    return _activations(binding.bind(eqn, *map(read, operands)))


def _stopped(eqn: Any, operands: Sequence[Any], _: Sequence[DualWeight]) -> list[Any]:
    """Stops the gradient: without the float32 value it has no way."""
    return binding.bind(eqn, *map(_value, operands))


def _converted(eqn: Any, operands: Sequence[Any], weights: Sequence[DualWeight]) -> Sequence[Any]:
    """Casts the half value; the float32 one stays."""
    if is_floating(eqn.params["new_dtype"]):
        return [dataclasses.replace(weights[0], value=binding.bind(eqn, weights[0].value)[0])]
    return _with_weights(eqn, operands, weights)


def _identity(eqn: Any, operands: Sequence[Any], _: Sequence[DualWeight]) -> list[Any]:
    """Names half values, or puts a barrier on them: they are what a policy of jax.checkpoint may save."""
    outs = binding.bind(eqn, *map(_value, operands))
    return [
        dataclasses.replace(value, value=out) if isinstance(value, DualWeight | Activation) else out
        for out, value in zip(outs, operands, strict=True)
    ]


def _broadcast(value: Any, like: Any) -> Any:
    """Broadcasts an operand before the operation does, so that its gradient is summed in float32."""
    if not isinstance(value, DualWeight) or value.value.shape == ir.shape_of(like):
        return value
    whole, fp32 = (ir.broadcast_like(x, like.aval) for x in (value.value, value.fp32))
    return DualWeight(whole, fp32, value.kind)


def _product(eqn: Any, operands: Sequence[Any]) -> Any:
    """Does a product: of weights alone it is a weight (LoRA's `a @ b`), otherwise an activation."""
    floats = [v for v, a in zip(operands, eqn.invars, strict=True) if is_floating(ir.dtype_of(a))]
    if any(v.value.dtype == FLOAT32 for v in floats if isinstance(v, DualWeight)):
        return Activation(binding.bind(eqn, *map(read, operands))[0])  # Cast back by the program.
    kinds = {v.kind for v in floats if isinstance(v, DualWeight)}
    has_whole = "whole" in kinds
    is_factor = [isinstance(v, DualWeight) and (v.kind == "whole" or not has_whole) for v in operands]
    values = [v.value if factor else read(v) for v, factor in zip(operands, is_factor, strict=True)]
    fp32 = [v.fp32 if factor else None for v, factor in zip(operands, is_factor, strict=True)]
    if sum(is_factor) < len(floats):
        return Activation(derived(eqn)(tuple(values), tuple(fp32)))
    # Its cotangent is summed already, and may be beyond half.
    out = derived(eqn, preferred_element_type=FLOAT32)(tuple(values), tuple(fp32))
    return DualWeight(binding.bind(eqn, *values)[0], out)


#: Operations of weights that are done in a way of their own.
_RULES: Mapping[str, Callable[[Any, Sequence[Any], Sequence[DualWeight]], Sequence[Any]]] = {
    "stop_gradient": _stopped,
    **dict.fromkeys(("name", "optimization_barrier"), _identity),
    "convert_element_type": _converted,
    **dict.fromkeys(op_table.LOWERED, lambda eqn, operands, _: [_product(eqn, operands)]),
}


def with_float32_gradients(
    fn: Callable[..., Any],
    *,
    opens_scope: bool = False,
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[..., Any]:
    """The function, with float32 gradients of every parameter that it casts by `cast_weight`.

    Where nothing is traced nobody differentiates, and the function runs as it is.

    Args:
      fn: a function of pytrees. Arguments and results that are no arrays are static.
      opens_scope: whether it opens a named scope of its own, which is to leave no trace.
      inside: makes active what is so in the function. JAX traces the rules of a custom_vjp, and the modules
        that they call, when it is differentiated: after the function has been traced.

    Warns:
      UserWarning: for places at which a gradient stays half.
    """

    @functools.wraps(fn)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        with TRACED_FOR_IT(True):
            if not any(map(ir.is_traced, jax.tree.leaves((args, kwargs)))):
                return fn(*args, **kwargs)
            jaxpr, arrays, rebuild = flattened(fn, args, kwargs)
        run = DualValues()
        with TRACED_FOR_IT(True), inside():
            made = binding.run_program(jaxpr, arrays, lambda *arrays: run.results(jaxpr, arrays, opens_scope))
        for place, why in run.missed.items():
            warnings.warn(
                f"grad_dtype=float32 does not reach a weight at {place}: {why}. Its gradient is as without.",
                UserWarning,
                stacklevel=2,
            )
        return rebuild(made)

    return in_float32


def as_cast_of(value: jax.Array, fp32: jax.Array) -> jax.Array:
    """A half value, as if it were the cast of a float32 one: the gradient goes there.

    A primitive, since JAX forgets a custom_jvp inside a scan where it differentiates that twice.
    """
    return _AS_CAST_OF.bind(value, fp32)


def _as_cast_of_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    out, (_, tangent) = as_cast_of(*primals), tangents
    return out, lax.convert_element_type(ad.instantiate_zeros(tangent), out.dtype)


def _batched_as_cast_of(operands: Any, axes: Any) -> tuple[Any, int]:
    if axes[0] == axes[1]:
        return as_cast_of(*operands), axes[0]
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    value, fp32 = (batching.bdim_at_front(x, axis, size) for x, axis in zip(operands, axes, strict=True))
    return as_cast_of(value, fp32), 0


_AS_CAST_OF = Primitive("as_cast_of")
_AS_CAST_OF.def_impl(lambda value, fp32: value)
_AS_CAST_OF.def_abstract_eval(lambda value, fp32: value)
ad.primitive_jvps[_AS_CAST_OF] = _as_cast_of_jvp
batching.primitive_batchers[_AS_CAST_OF] = _batched_as_cast_of
mlir.register_lowering(_AS_CAST_OF, lambda context, value, fp32: [value])


def derived(eqn: Any, cotangent: Any = None, **changed: Any) -> Callable[..., Any]:
    """A product as a function, the gradients of some of whose operands go to float32 arrays.

    It takes half operands, and for each the float32 array that it is the cast of, or None.

    Args:
      eqn: a product with `preferred_element_type`, linear in each floating operand.
      cotangent: a dtype to round the cotangent to before it meets half operands.
      changed: other parameters than the equation's.
    """
    params = tuple((eqn.params | changed).items())
    return _derived_product(eqn.primitive, params, compat.context_of(eqn), cotangent)


@functools.lru_cache(maxsize=4096)
def _derived_product(primitive: Any, params: Any, _: Any, cotangent: Any) -> Callable[..., Any]:
    """One function per kind of product, so that JAX traces it once."""

    def bound(*operands: Any, **changed: Any) -> Any:
        return binding.bind_product(primitive, operands, dict(params) | changed)[0]

    @jax.custom_vjp
    def call(operands: Any, fp32: Any) -> Any:
        return bound(*operands)

    def forward(operands: Any, fp32: Any) -> Any:
        # A derivative of this derivative (a loss that holds jax.grad) finds its way to the float32 arrays.
        pairs = zip(operands, fp32, strict=True)
        taken = [x.value if w is None else as_cast_of(x.value, w.value) for x, w in pairs]
        # An empty tuple where a derivative is asked for: structure, which is known when this is traced.
        asked = [() if operand.perturbed else None for operand in operands]
        asked_fp32 = [None if w is None or not w.perturbed else () for w in fp32]
        return bound(*taken), (taken, asked, asked_fp32)

    def backward(residuals: Any, ct: Any) -> Any:
        taken, asked, asked_fp32 = residuals
        if isinstance(ct, jax.custom_derivatives.SymbolicZero):
            return (None,) * len(taken), (None,) * len(taken)
        linear = bound
        if cotangent is not None:
            ct = lax.convert_element_type(ct, cotangent)
            linear = functools.partial(bound, preferred_element_type=cotangent)

        def transposed(place: int) -> Callable[[Any], Any]:
            function = lambda x: linear(*taken[:place], x, *taken[place + 1 :])  # noqa: E731
            return jax.linear_transpose(function, taken[place])

        own = [None if is_asked is None else transposed(i)(ct)[0] for i, is_asked in enumerate(asked)]
        wide = enumerate(asked_fp32)
        fp32 = [None if is_asked is None else _float32_derivative(transposed(i), ct) for i, is_asked in wide]
        return tuple(own), tuple(fp32)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _float32_derivative(transpose: Callable[[Any], Any], ct: Any) -> Any:
    """What a transpose gives, in the float32 that its product accumulates in."""

    def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "convert_element_type" and values[0].dtype == FLOAT32:
            return values  # It would narrow what the product gave.
        params = dict(eqn.params)
        if "preferred_element_type" in params:
            params["preferred_element_type"] = FLOAT32
        with compat.eqn_context(eqn):
            return binding.bind_product(eqn.primitive, values, params)

    jaxpr = jax.make_jaxpr(lambda ct: transpose(ct)[0])(ct)
    return lax.convert_element_type(ir.evaluate(jaxpr, [ct], step)[0], FLOAT32)
