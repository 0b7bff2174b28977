"""Products of bfloat16 arrays that are fast on a CPU, and the same as ever elsewhere.

XLA computes a bfloat16 product on a CPU by converting its operands to float32, which is slower than float32
itself. Asked for a float32 result it takes the CPU's bfloat16 instructions, if the operands lie as its
library wants them. Where it folds a transpose into such a product later on, the program compiles, and fails
when it runs. What a program is compiled for is known when it is lowered, so the choice is a lowering rule.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad, batching, mlir

from jmp_policy._jaxpr import evaluate

_DOT = primitives.dot_general_p
#: Named as JAX's is: who reads jaxprs sees the same operation with the same parameters.
_CPU_DOT = Primitive("dot_general")


def chosen(primitive: Any, operands: Sequence[Any]) -> Any:
    """The primitive to bind in the place of another one, for these operands.

    Ours only where the default backend is a CPU: elsewhere programs are for other devices, and policies of
    `jax.checkpoint` that save products know JAX's primitive.
    """
    is_ours = primitive is _DOT and _are_bfloat16(operands) and jax.default_backend() == "cpu"
    return _CPU_DOT if is_ours else primitive


def _are_bfloat16(operands: Sequence[Any]) -> bool:
    return all(x.dtype == jnp.bfloat16 for x in operands)


def _plain(lhs: Any, rhs: Any, **params: Any) -> Any:
    return _DOT.bind(lhs, rhs, **params)


def _on_cpu(lhs: Any, rhs: Any, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any) -> Any:
    """The product with a float32 result, rows of the first operand by columns of the second."""
    (left, right), (left_batch, right_batch) = dimension_numbers
    lhs = _ordered(lhs, (*left_batch, *_others(lhs, left, left_batch), *left))
    rhs = _ordered(rhs, (*right_batch, *right, *_others(rhs, right, right_batch)))
    batch, count = tuple(range(len(left_batch))), len(left)
    dims = (tuple(range(lhs.ndim - count, lhs.ndim)), tuple(range(len(batch), len(batch) + count)))
    out = _DOT.bind(
        lhs,
        rhs,
        dimension_numbers=(dims, (batch, batch)),
        preferred_element_type=np.dtype(np.float32),
        **params,
    )
    # Nor the transpose of a result.
    return lax.convert_element_type(lax.optimization_barrier(out), preferred_element_type or lhs.dtype)


def _others(x: Any, *taken: Sequence[int]) -> list[int]:
    return [axis for axis in range(x.ndim) if not any(axis in axes for axes in taken)]


def _ordered(x: Any, axes: tuple[int, ...]) -> Any:
    """With its axes in this order, in memory as well: XLA folds no transpose into the product then."""
    return x if axes == tuple(range(x.ndim)) else lax.optimization_barrier(lax.transpose(x, axes))


def _differentiated(function: Callable[..., Any], *arrays: Any) -> Any:
    """What a function of arrays gives, its products being bound as ours."""

    def step(eqn: Any, values: list[Any]) -> list[Any]:
        primitive = _CPU_DOT if eqn.primitive is _DOT and _are_bfloat16(values) else eqn.primitive
        out = primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return out if primitive.multiple_results else [out]

    return evaluate(jax.make_jaxpr(function)(*arrays), arrays, step)[0]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (lhs, rhs), (of_lhs, of_rhs) = primals, tangents
    out, terms = _CPU_DOT.bind(lhs, rhs, **params), []
    if not isinstance(of_lhs, ad.Zero):
        terms.append(_CPU_DOT.bind(of_lhs, rhs, **params))
    if not isinstance(of_rhs, ad.Zero):
        terms.append(_CPU_DOT.bind(lhs, of_rhs, **params))
    return out, functools.reduce(lax.add, terms) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


def _transpose(ct: Any, lhs: Any, rhs: Any, **params: Any) -> tuple[Any, Any]:
    """By JAX's own rule; a float32 cotangent's product is one of float32 then, and none of ours."""
    is_lhs = ad.is_undefined_primal(lhs)
    of, other = (lhs, rhs) if is_lhs else (rhs, lhs)

    def linear(x: Any) -> Any:
        return _plain(x, other, **params) if is_lhs else _plain(other, x, **params)

    out = _differentiated(lambda ct: jax.linear_transpose(linear, of.aval)(ct)[0], ct)
    return (out, None) if is_lhs else (None, out)


def _batched(arrays: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    return _differentiated(jax.vmap(functools.partial(_plain, **params), tuple(axes)), *arrays), 0


_CPU_DOT.def_impl(_plain)
_CPU_DOT.def_abstract_eval(lambda *avals, **params: _DOT.abstract_eval(*avals, **params)[0])
ad.primitive_jvps[_CPU_DOT] = _jvp
ad.primitive_transposes[_CPU_DOT] = _transpose
batching.primitive_batchers[_CPU_DOT] = _batched
mlir.register_lowering(_CPU_DOT, mlir.lower_fun(_plain, multiple_results=False))
mlir.register_lowering(_CPU_DOT, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
