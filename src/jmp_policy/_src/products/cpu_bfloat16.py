"""Bfloat16 products and sums that are fast on a CPU, and the same as ever elsewhere.

XLA computes a bfloat16 product on a CPU by converting its operands to float32, which is slower than float32
itself. Asked for a float32 result it takes the CPU's bfloat16 instructions, if the operands lie as its
library wants them. Where it folds a transpose into such a product later on, the program compiles, and fails
when it runs. Sums that differentiation leaves in bfloat16 (a bias's gradient) it rounds on the way, slowly.
Convolutions it knows in float32 alone, but those with windows of one element are products.

What a program is compiled for is known when it is lowered, so the choice is a lowering rule: JAX's own, but
for operations that were traced in a scope of ours. What marks them is metadata that XLA takes no notice of (a
frontend attribute). JAX hands it on to derivatives, and tells lowered operations apart by it.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives
from jax.interpreters import mlir

from jmp_policy._src.products import cpu_convolutions, cpu_products

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


def _sum(x: Any, **params: Any) -> Any:
    wide = lax.convert_element_type(x, _FLOAT32)
    return lax.convert_element_type(primitives.reduce_sum_p.bind(wide, **params), x.dtype)


#: Primitive -> what computes it, for types of operands and result and for its parameters; None: JAX's own.
_RULES: dict[Any, Callable[[Sequence[Any], Any, dict[str, Any]], Callable[..., Any] | None]] = {
    primitives.dot_general_p: lambda *_: cpu_products.product,
    primitives.reduce_sum_p: lambda *_: _sum,
    primitives.conv_general_dilated_p: cpu_convolutions.rule,
}


def _lower(choose: Callable[..., Any], jax_rule: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    are_bfloat16 = all(aval.dtype == jnp.bfloat16 for aval in ctx.avals_in)
    (out,) = ctx.avals_out
    fits = jnp.issubdtype(out.dtype, jnp.floating) and out.dtype.itemsize <= _FLOAT32.itemsize
    marks = (ctx.jaxpr_eqn_ctx and ctx.jaxpr_eqn_ctx.xla_metadata) or {}
    is_ours = are_bfloat16 and fits and params.get("out_sharding") is None and _MARK in marks
    ours = choose(ctx.avals_in, out, params) if is_ours else None
    if ours is None:
        return jax_rule(ctx, *operands, **params)
    # The product within ours is JAX's.
    with set_xla_metadata(**{_MARK: None}):
        return mlir.lower_fun(ours, multiple_results=False)(ctx, *operands, **params)


@functools.cache
def _register() -> None:
    """Puts our rules in front of JAX's, once there is something for them to do.

    From then on a program exported for several platforms, a CPU among them, has a case for each product, sum
    and convolution. JAX has no public way to ask for a rule, so where its tables are not as in the versions
    that we know, its own rules stay: bfloat16 is slow on a CPU then.
    """
    for primitive, choose in _RULES.items():
        try:
            known = mlir._platform_specific_lowerings["cpu"].get(primitive) or mlir._lowerings[primitive]
            rule = functools.partial(_lower, choose, known.rule)
            mlir.register_lowering(primitive, rule, platform="cpu")
        except (AttributeError, KeyError, TypeError):
            return
