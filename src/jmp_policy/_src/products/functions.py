"""JAX's matrix product as a function and a primitive of our own: the same, but for how a CPU computes it.

Flax's layers and `jnp.einsum` take a function in place of `lax.dot_general` as an argument, so the policy
hands them this one.

A product has to know what it was written for when it is lowered, once the platform is known, and its
derivatives have to know it too. `lax.platform_dependent` does not carry that far: it is differentiated branch
by branch, so the CPU's branch would be transposed into a product of float32 with bfloat16, which is slow, and
`lax.scan` would save a copy of the weights for every step. A primitive of our own is one equation, before
and after differentiation.

Everything else about it is JAX's: it has JAX's name and parameters, its shapes, shardings, derivatives and
batching are those of JAX's primitive, and on devices that need no other way it is lowered to JAX's operation,
so that the program is the same. No rule is registered for a primitive of JAX's.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, Primitive, primitives
from jax.interpreters import ad, batching, mlir

from jmp_policy._src.jaxpr import compat, ir, op_table
from jmp_policy._src.products import cpu_products

#: Binds the product of an equation of JAX's to operands.
Bind = Callable[[Any, Sequence[Any]], Any]


def product_primitive(
    like: Primitive,
    abstract: Callable[..., Any],
    batched: Callable[..., Any],
    lowerings: Mapping[str | None, Callable[..., Any]],
) -> Primitive:
    """Makes a primitive that stands in for one of JAX's products; its derivatives are added by the caller.

    Args:
      like: JAX's primitive, whose name it has.
      abstract: gives the type of the result, as JAX's does.
      batched: its rule for `vmap`.
      lowerings: how each platform computes it; None for all others.
    """
    primitive = Primitive(like.name)

    def run_alone(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # Or it would call itself.
            return _jitted(primitive, tuple(params.items()))(*operands)

    primitive.def_impl(run_alone)
    primitive.def_effectful_abstract_eval(abstract)
    batching.fancy_primitive_batchers[primitive] = batched
    for platform, function in lowerings.items():
        mlir.register_lowering(primitive, function, platform=platform)
    compat.set_checkpoint_rule(primitive, functools.partial(_checkpointed, like))
    return primitive


@functools.lru_cache(maxsize=1024)
def _jitted(primitive: Primitive, params: tuple[Any, ...]) -> Callable[..., Any]:
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))


def lowered(function: Callable[..., Any]) -> Callable[..., Any]:
    """How a platform computes a primitive: as a function of its operands and parameters."""
    return mlir.lower_fun(function, multiple_results=False)


def evaluated(jaxpr: Any, values: Sequence[Any], bind: Bind) -> Any:
    """The first result of a jaxpr whose products are bound by a function, on the current source line."""

    def step(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name in op_table.LOWERED:
            return [bind(eqn, operands)]
        return compat.bind_primitive(eqn.primitive, operands, eqn.params)

    return ir.evaluate(jaxpr, values, step)[0]


def batched_as(
    like: Primitive, bind: Bind, axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """Batches a product as JAX batches its own; `bind` does that of the whole batch."""
    out_dim = None

    def call(*operands: Any) -> Any:
        nonlocal out_dim
        out, out_dim = batching.fancy_primitive_batchers[like](axis, operands, dims, **params)
        return out

    return evaluated(jax.make_jaxpr(call)(*map(jax.typeof, operands)), operands, bind), out_dim


@functools.lru_cache(maxsize=4096)
def transposed_jaxpr(like: Any, place: int, types: tuple[Any, ...], params: tuple[Any, ...], _: Any) -> Any:
    """The jaxpr of JAX's transpose of a product by one operand.

    Args:
      like: JAX's primitive.
      place: of the operand.
      types: of the cotangent, the other operand, this one and further operands.
      params: items of the product's parameters.
      _: the mesh, on which the transpose depends too.
    """
    cotangent, other, linear, *more = types

    def call(cotangent: Any, other: Any, *more: Any) -> Any:
        operands = [other, other, *more]
        operands[place] = ad.UndefinedPrimal(linear)
        return ad.primitive_transposes[like](cotangent, *operands, **dict(params))[place]

    return jax.make_jaxpr(call)(cotangent, other, *more)


def _checkpointed(like: Any, saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
    """Says what `jax.checkpoint` does with a product: policies that save JAX's save ours as well."""
    needed = [
        var
        for var, is_there in zip(eqn.invars, instantiated, strict=True)
        if not is_there and not isinstance(var, Literal)
    ]
    if any(unknown):
        return None, eqn, [True], [True], needed
    operands = (var.aval for var in eqn.invars[:2])
    if compat.is_saved(saveable(like, *operands, **eqn.params)):
        return eqn, None, [False], [False], []
    return eqn, eqn, [False], [True], needed


_JAXS = primitives.dot_general_p


def _batched(*args: Any, **params: Any) -> Any:
    return batched_as(_JAXS, lambda eqn, values: DOT_GENERAL.bind(*values, **eqn.params), *args, **params)


def _transposed(place: int, cotangent: Any, *operands: Any, **params: Any) -> Any:
    other, mesh = operands[1 - place], jax.sharding.get_abstract_mesh()
    types = jax.typeof(cotangent), jax.typeof(other), operands[place].aval
    jaxpr = transposed_jaxpr(_JAXS, place, types, tuple(params.items()), mesh)
    return evaluated(jaxpr, (cotangent, other), bind_suited)


def _on_cpu(ctx: Any, *operands: Any, **params: Any) -> Any:
    is_bfloat16 = all(aval.dtype == jnp.bfloat16 for aval in ctx.avals_in)
    return lowered(cpu_products.product if is_bfloat16 else _JAXS.bind)(ctx, *operands, **params)


#: JAX's matrix product, which a CPU computes in another way of bfloat16 operands.
DOT_GENERAL = product_primitive(
    _JAXS, _JAXS.abstract_eval, _batched, {None: lowered(_JAXS.bind), "cpu": _on_cpu}
)
ad.defbilinear(DOT_GENERAL, functools.partial(_transposed, 0), functools.partial(_transposed, 1))


def primitive_for(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the primitive to bind in place of another, for these operands.

    Where the default backend is a CPU, ours for a matrix product of bfloat16 operands with a floating result
    of at most 32 bits; JAX's for all other products, and any other primitive itself.

    Args:
      primitive: JAX's or ours.
      operands: arrays, or their types.
      params: of the operation.
    """
    jaxs = _JAXS if primitive is DOT_GENERAL else primitive
    if jaxs is not _JAXS or not all(x.dtype == jnp.bfloat16 for x in operands):
        return jaxs
    result = params.get("preferred_element_type")
    fits = result is None or (jnp.issubdtype(result, jnp.floating) and jnp.dtype(result).itemsize <= 4)
    is_ours = fits and params.get("out_sharding") is None and jax.default_backend() == "cpu"
    return DOT_GENERAL if is_ours else jaxs


def bind_suited(eqn: Any, operands: Sequence[Any]) -> Any:
    """Does a product of operands, which may be in other dtypes, by the primitive that suits them."""
    return primitive_for(eqn.primitive, operands, eqn.params).bind(*operands, **eqn.params)


@functools.wraps(lax.dot_general)
def dot_general(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """`lax.dot_general`, by our primitive where operands are bfloat16."""
    if not all(getattr(x, "dtype", None) == jnp.bfloat16 for x in (lhs, rhs)):
        return lax.dot_general(lhs, rhs, *args, **kwargs)
    return bound_by(bind_suited, lax.dot_general, lhs, rhs, *args, **kwargs)


def bound_by(bind: Bind, function: Callable[..., Any], lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """A product of `jax.lax`, with its operation bound by a function.

    Only JAX knows what its arguments come to (padding by name, the default precision); inside `shard_map` an
    operand may be marked as varying first.
    """
    types = jax.typeof(lhs), jax.typeof(rhs)
    jaxpr = jax.make_jaxpr(lambda lhs, rhs: function(lhs, rhs, *args, **kwargs))(*types)
    return evaluated(jaxpr, (lhs, rhs), bind)


def stand_in(function: Any, dtype: Any) -> Any:
    """Returns what a layer that computes in a dtype calls instead of its matrix product.

    Any but JAX's comes back as it is: a user's own wins. So does JAX's while another library has replaced it,
    as those that quantise do.
    """
    return dot_general if is_jaxs_own(function) and are_chosen(dtype) else function


_CODE = lax.dot_general.__code__


def is_jaxs_own(function: Any) -> bool:
    """Returns whether a function is `lax.dot_general`, and nobody has replaced it."""
    return function is lax.dot_general and getattr(function, "__code__", None) is _CODE


def are_chosen(dtype: Any) -> bool:
    """Returns whether code that computes in a dtype takes its products from here.

    Only bfloat16 does, where the default backend is a CPU: whoever traces for a GPU gets JAX's primitives.
    """
    return dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
