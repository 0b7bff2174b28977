"""Bfloat16 products and sums that are fast on a CPU, and the same as ever elsewhere.

XLA computes a bfloat16 product on a CPU by converting its operands to float32, which is slower than float32
itself. Asked for a float32 result it takes the CPU's bfloat16 instructions, if the operands lie as its
library wants them. Where it folds a transpose into such a product later on, the program compiles, and fails
when it runs. Sums that differentiation leaves in bfloat16 (a bias's gradient) it rounds on the way, slowly.

What a program is compiled for is known when it is lowered, so the choice is a lowering rule: JAX's own, but
for operations that were traced in a scope of ours. What marks them is metadata that XLA takes no notice of (a
frontend attribute). JAX hands it on to derivatives, and tells lowered operations apart by it.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives
from jax.interpreters import mlir

_MARK = "jmp_policy_bfloat16_on_cpu"
_NO_SCOPE = contextlib.nullcontext()
_FLOAT32 = np.dtype(np.float32)


def scope(dtype: Any) -> contextlib.AbstractContextManager[Any]:
    """A with-block whose bfloat16 operations, and those of their derivatives, are fast on a CPU.

    Args:
      dtype: what the code in the block computes in; others than bfloat16 need no scope. Nor do programs that
        are traced where the default backend is no CPU.
    """
    if dtype != jnp.bfloat16 or jax.default_backend() != "cpu":
        return _NO_SCOPE
    _register()
    return set_xla_metadata(**{_MARK: True})


def scope_of(primitive: Any, operands: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """The scope to bind a primitive in, for these operands."""
    is_ours = primitive in _RULES and all(x.dtype == jnp.bfloat16 for x in operands)
    return scope(jnp.bfloat16) if is_ours else _NO_SCOPE


class _Operand(NamedTuple):
    """An operand of a product: its axes are batches, contracted, or free."""

    array: Any
    contracted: tuple[int, ...]
    batch: tuple[int, ...]

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.array.ndim) if i not in (*self.contracted, *self.batch))

    @property
    def is_rows(self) -> bool:
        return _are_ordered(self.batch, self.free, self.contracted)

    @property
    def is_columns(self) -> bool:
        return _are_ordered(self.batch, self.contracted, self.free)

    def placed(self, columns: bool = False) -> "_Operand":
        """With its axes in the order of rows (or, if they are, of columns), in memory as well.

        XLA looks at the order in memory before it has decided on any, and takes a transpose to have changed
        it: after one more axis it does not. The barrier keeps transposes out of the product, also the user's.
        """
        array, contracted = self.array, self.contracted
        if columns and self.is_columns:
            at = len(self.batch) + len(contracted)
        else:
            at = array.ndim - len(contracted)
            contracted = tuple(range(at + 1, array.ndim + 1))
            if not self.is_rows:
                array = lax.transpose(array, (*self.batch, *self.free, *self.contracted))
        array = lax.optimization_barrier(array)
        array = lax.reshape(array, (*array.shape[:at], 1, *array.shape[at:]))
        return _Operand(array, contracted, tuple(range(len(self.batch))))


def _are_ordered(*axes: tuple[int, ...]) -> bool:
    flat = list(itertools.chain(*axes))
    return flat == sorted(flat)


def _product(
    lhs: Any, rhs: Any, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any
) -> Any:
    """The product with a float32 result, of operands that lie as XLA's library for products wants them."""
    (left, right), (left_batch, right_batch) = dimension_numbers
    rows, columns = _Operand(lhs, left, left_batch), _Operand(rhs, right, right_batch)
    # Turned round, its transpose meets the one that JAX takes of a weight's gradient.
    is_turned = not rows.is_rows
    if is_turned:
        rows, columns = columns, rows
    outer = *rows.batch, *rows.free
    shape = *(rows.array.shape[i] for i in outer), *(columns.array.shape[i] for i in columns.free)
    batch, split = len(rows.batch), len(outer)
    rows, columns = rows.placed(), columns.placed(columns=True)
    out = primitives.dot_general_p.bind(
        rows.array,
        columns.array,
        dimension_numbers=((rows.contracted, columns.contracted), (rows.batch, columns.batch)),
        preferred_element_type=_FLOAT32,
        **params,
    )
    # Nor may a transpose of the result get into the product.
    out = lax.reshape(lax.optimization_barrier(out), shape)
    out = lax.convert_element_type(out, preferred_element_type or lhs.dtype)
    if is_turned:
        out = lax.transpose(out, (*range(batch), *range(split, out.ndim), *range(batch, split)))
    return out


def _sum(x: Any, **params: Any) -> Any:
    wide = lax.convert_element_type(x, _FLOAT32)
    return lax.convert_element_type(primitives.reduce_sum_p.bind(wide, **params), x.dtype)


_RULES = {primitives.dot_general_p: _product, primitives.reduce_sum_p: _sum}


def _lower(ours: Callable[..., Any], jax_rule: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    are_bfloat16 = all(aval.dtype == jnp.bfloat16 for aval in ctx.avals_in)
    is_wider = any(aval.dtype.itemsize > _FLOAT32.itemsize for aval in ctx.avals_out)
    marks = (ctx.jaxpr_eqn_ctx and ctx.jaxpr_eqn_ctx.xla_metadata) or {}
    if not are_bfloat16 or is_wider or params.get("out_sharding") is not None or _MARK not in marks:
        return jax_rule(ctx, *operands, **params)
    # The product within ours is JAX's.
    with set_xla_metadata(**{_MARK: None}):
        return mlir.lower_fun(ours, multiple_results=False)(ctx, *operands, **params)


@functools.cache
def _register() -> None:
    """Puts our rules in front of JAX's, once there is something for them to do.

    From then on a program exported for several platforms, a CPU among them, has a case for each product and
    sum. JAX has no public way to ask for a rule, so where its tables are not as in the versions that we know,
    its own rules stay: bfloat16 is slow on a CPU then.
    """
    for primitive, ours in _RULES.items():
        try:
            known = mlir._platform_specific_lowerings["cpu"].get(primitive) or mlir._lowerings[primitive]
            rule = functools.partial(_lower, ours, known.rule)
            mlir.register_lowering(primitive, rule, platform="cpu")
        except (AttributeError, KeyError, TypeError):
            return
