"""JAX's products as primitives of our own: the same operations, but for how a platform computes them.

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
from jax.extend.core import Literal, Primitive, primitives
from jax.interpreters import ad, batching, mlir

from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.device_dispatch import GPUS
from jmp_policy._src.products import cpu_products

#: Gives what computes a product on a CPU, for the types of operands and result and the parameters; None for
#: JAX's own operation.
_Chooser = Callable[[Sequence[Any], Any, dict[str, Any]], Callable[..., Any] | None]


def _product_primitive(like: Any, choose: _Chooser, on_gpu: Callable[..., Any] | None = None) -> Primitive:
    """Makes a primitive that is one of JAX's bilinear ones, computed in another way on some platforms.

    Args:
      like: JAX's primitive.
      choose: says how a CPU computes it for bfloat16 operands.
      on_gpu: how a GPU does; None for JAX's own operation.
    """
    primitive = Primitive(like.name)

    primitive.def_impl(functools.partial(run_alone, primitive))
    primitive.def_effectful_abstract_eval(like.abstract_eval)

    def transposed(place: int, cotangent: Any, *operands: Any, **params: Any) -> Any:
        other = operands[1 - place]
        types = jax.typeof(cotangent), jax.typeof(other), operands[place].aval
        mesh = jax.sharding.get_abstract_mesh()
        jaxpr = transposed_jaxpr(like, place, types, tuple(params.items()), mesh)
        return _evaluated(jaxpr, {}, cotangent, other)[0]

    ad.defbilinear(primitive, functools.partial(transposed, 0), functools.partial(transposed, 1))

    def batched(axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        out_dim = None

        def call(*operands: Any) -> Any:
            nonlocal out_dim
            out, out_dim = batching.fancy_primitive_batchers[like](axis, operands, dims, **params)
            return out

        (out,) = _evaluated(jax.make_jaxpr(call)(*map(jax.typeof, operands)), {like: primitive}, *operands)
        return out, out_dim

    batching.fancy_primitive_batchers[primitive] = batched

    def lower_for_cpu(ctx: Any, *operands: Any, **params: Any) -> Any:
        is_bfloat16 = all(aval.dtype == jnp.bfloat16 for aval in ctx.avals_in)
        function = (is_bfloat16 and choose(ctx.avals_in, ctx.avals_out[0], params)) or like.bind
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands, **params)

    mlir.register_lowering(primitive, mlir.lower_fun(like.bind, multiple_results=False))
    mlir.register_lowering(primitive, lower_for_cpu, platform="cpu")
    if on_gpu is not None:
        for platform in GPUS:
            mlir.register_lowering(primitive, mlir.lower_fun(on_gpu, multiple_results=False), platform)
    compat.set_checkpoint_rule(primitive, functools.partial(checkpointed, like))
    return primitive


def run_alone(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Runs a primitive outside of any trace."""
    with jax.disable_jit(False):  # Or it would call itself.
        return _jitted(primitive, tuple(params.items()))(*operands)


@functools.lru_cache(maxsize=1024)
def _jitted(primitive: Primitive, params: tuple[Any, ...]) -> Callable[..., Any]:
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))


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


def _evaluated(closed: Any, given: Mapping[Any, Any], *values: Any) -> list[Any]:
    """Evaluates a jaxpr with our primitives in place of JAX's, on the current source line.

    Args:
      closed: the jaxpr.
      given: which of our primitives to take for one of JAX's; `primitive_for` says it for the others.
      values: the arguments.
    """
    jaxpr, source = compat.open_jaxpr(closed), compat.without_name_stack()

    def ours(eqn: Any) -> Any:
        found = given.get(eqn.primitive)
        return found or primitive_for(eqn.primitive, [var.aval for var in eqn.invars], eqn.params)

    eqns = [compat.changed_equation(eqn, ours(eqn), source) for eqn in jaxpr.eqns]
    return jax.core.eval_jaxpr(jaxpr.replace(eqns=eqns), compat.constants(closed), *values)


def checkpointed(like: Any, saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
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


DOT_GENERAL = _product_primitive(primitives.dot_general_p, lambda *_: cpu_products.product)
CONV_GENERAL_DILATED = _product_primitive(primitives.conv_general_dilated_p, cpu_products.convolution)
#: A convolution of half operands with a float32 result, which is rounded to half on GPUs.
CONV_WITH_FLOAT32_RESULT = _product_primitive(
    primitives.conv_general_dilated_p, cpu_products.convolution, on_gpu=cpu_products.convolved_in_half
)

_OURS = {
    primitives.dot_general_p: DOT_GENERAL,
    primitives.conv_general_dilated_p: CONV_GENERAL_DILATED,
}
#: JAX's primitive for each of ours that stands in for it.
JAXS = {ours: jaxs for jaxs, ours in _OURS.items()}


def primitive_for(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the primitive to bind in place of another, for these operands.

    Where the default backend is a CPU, one of ours for a product of bfloat16 operands with a floating result
    of at most 32 bits; JAX's for all other products, and any other primitive itself,
    `CONV_WITH_FLOAT32_RESULT` too.

    Args:
      primitive: JAX's or ours.
      operands: arrays, or their types.
      params: of the operation.
    """
    if primitive is CONV_WITH_FLOAT32_RESULT:
        return primitive
    jaxs = JAXS.get(primitive, primitive)
    if jaxs not in _OURS or not all(x.dtype == jnp.bfloat16 for x in operands):
        return jaxs
    result = params.get("preferred_element_type")
    fits = result is None or (jnp.issubdtype(result, jnp.floating) and jnp.dtype(result).itemsize <= 4)
    is_ours = fits and params.get("out_sharding") is None and jax.default_backend() == "cpu"
    return _OURS[jaxs] if is_ours else jaxs
