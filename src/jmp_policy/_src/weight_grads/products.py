"""Half values of weights, and products of them, whose derivatives by the weights are float32.

Forward, and for the other operands, nothing differs from the operation as it was traced. The product that
gives a weight's gradient has half operands too, and returns what it accumulated in float32 anyway.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.products.binding import bind_product


@jax.custom_jvp
def joined(value: Any, fp32: Any) -> Any:
    """A half value, as if it were the cast of a float32 one."""
    return value


@joined.defjvp
def _joined_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    value, _ = primals
    return value, lax.convert_element_type(tangents[1], value.dtype)


def product(
    eqn: Any, operands: Sequence[Any], fp32: Sequence[Any], *, cotangent: Any = None, result: Any = None
) -> Any:
    """Computes a product, the gradients of some of whose operands go to float32 arrays.

    Args:
      eqn: a product with `preferred_element_type`, linear in each floating operand.
      operands: half arrays.
      fp32: for each operand the float32 array that it is the cast of, or None.
      cotangent: a dtype to round the cotangent to before it meets half operands.
      result: dtype of the result, if it is to be another one.
    """
    params = eqn.params if result is None else eqn.params | {"preferred_element_type": result}
    function = _product(eqn.primitive, tuple(params.items()), compat.context_of(eqn), cotangent)
    return function(tuple(operands), tuple(fp32))


@functools.lru_cache(maxsize=4096)
def _product(primitive: Any, params: Any, _: Any, cotangent: Any) -> Callable[..., Any]:
    """One function per kind of product, so that JAX traces it once."""

    def bound(*operands: Any, **changed: Any) -> Any:
        return bind_product(primitive, operands, dict(params) | changed)[0]

    @jax.custom_vjp
    def call(operands: Any, fp32: Any) -> Any:
        return bound(*operands)

    def forward(operands: Any, fp32: Any) -> Any:
        taken = [operand.value for operand in operands]
        asked = tuple(operand.perturbed for operand in operands)
        asked_fp32 = tuple(w is not None and w.perturbed for w in fp32)
        return bound(*taken), (taken, _Static((asked, asked_fp32)))

    def backward(residuals: Any, ct: Any) -> Any:
        taken, static = residuals
        asked, asked_fp32 = static.value
        if isinstance(ct, jax.custom_derivatives.SymbolicZero):
            return (None,) * len(taken), (None,) * len(taken)
        linear = bound
        if cotangent is not None:
            ct = lax.convert_element_type(ct, cotangent)
            linear = functools.partial(bound, preferred_element_type=cotangent)
        places = range(len(taken))
        return (
            tuple(_transposed(linear, taken, i)(ct)[0] if asked[i] else None for i in places),
            tuple(
                _float32_derivative(_transposed(linear, taken, i), ct) if asked_fp32[i] else None
                for i in places
            ),
        )

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


@jax.tree_util.register_static
class _Static:
    """A value that is known when the program is traced, among the residuals."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


def _transposed(linear: Any, taken: Sequence[Any], place: int) -> Callable[[Any], Any]:
    """The transpose of a product by one operand, as JAX has it."""

    def of_operand(x: Any) -> Any:
        return linear(*taken[:place], x, *taken[place + 1 :])

    return jax.linear_transpose(of_operand, taken[place])


def _float32_derivative(transpose: Callable[[Any], Any], ct: Any) -> Any:
    """What a transpose gives, in the float32 that its product accumulates in."""

    def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "convert_element_type" and values[0].dtype == FLOAT32:
            return values  # It would narrow what the product gave.
        params = dict(eqn.params)
        if "preferred_element_type" in params:
            params["preferred_element_type"] = FLOAT32
        with compat.eqn_context(eqn):
            return bind_product(eqn.primitive, values, params)

    jaxpr = jax.make_jaxpr(lambda ct: transpose(ct)[0])(ct)
    return lax.convert_element_type(ir.evaluate(jaxpr, [ct], step)[0], FLOAT32)
