"""The float8 product as a primitive: JAX's `dot_general` of half operands, computed from float8 ones.

That of `ragged_dot_general`, of the rows of each expert with its weight, is another one, of the same rules.

They have five more operands. Three are scales: of both, and of the cotangent where that is known beforehand.
Those of blocks it computes itself; where gradients are rounded at random, the third is the data of a key. Two
are the bits of the rounded operands, which it multiplies where they are given. They have a name, so that a
policy of `jax.checkpoint` can keep them. The half operands are there to be differentiated by; XLA drops them.

As it is bilinear in the first two, its derivatives are products of the same kind, of a cotangent in e5m2 with
the other operand, in any order of differentiation, and `vmap` makes one product of many. A `custom_vjp`, as
Flax's and TransformerEngine's products are, would make of a `vmap` over examples one weight gradient per
example, and could not be differentiated twice.

A recipe may be for one pass only. Forward, the product of the other pass is one of half operands that knows
how its gradients are computed; backward, it is JAX's own.

Operands that the gradients' products need in other blocks are kept as they came and rounded again. Tangents
are not rounded: forward-mode derivatives are exact to compute dtype.
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
from jax.interpreters import ad
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.policy.recipes import DELAYED, needs_key, parts_of_nvfp4, passes_of
from jmp_policy._src.products import functions
from jmp_policy._src.products.fp8 import nvfp4, ragged
from jmp_policy._src.products.fp8.eligibility import recipe_of
from jmp_policy._src.products.fp8.scales import (
    BLOCKS,
    FLOAT4,
    GRADIENT,
    VALUE,
    Scaled,
    as_matrices,
    has_blocks,
    like_result,
    named_bits,
    quantised,
    rounded_by_blocks,
    scale_of,
    scaled_product,
)

#: Recipes with one scale per tensor, which forward and gradients share.
_PER_TENSOR = ("fp8_current", DELAYED)

_OWN = ("recipe", "formats", "weight", "gradient")


def _value_format(recipe: str | None) -> str:
    return VALUE if parts_of_nvfp4(recipe) is None else FLOAT4


def bind_float8(
    operands: Sequence[Any],
    recipe: str,
    params: dict[str, Any],
    formats: Sequence[str] | None = None,
    scales: Sequence[Any] = (None, None, None),
    unmarked: Sequence[Any] | None = None,
    rounded: Sequence[Any] = (None, None),
    weight: int | None = 1,
    gradient: int | None = None,
    like: Primitive = primitives.dot_general_p,
) -> Any:
    """Binds the product of two half operands.

    Args:
      operands: two float16 or bfloat16 arrays, and the sizes of groups if the product has them.
      recipe: of this product and of its gradients, as a policy has it.
      params: those of JAX's primitive.
      formats: dtype of each operand; None for that of values.
      scales: of each operand, and of the result's cotangent (or the data of a key for rounding it at random);
        None for the one that the recipe gives it.
      unmarked: the operands as they were before `shard_map` marked them as varying, so that of a weight which
        is the same everywhere nobody communicates the largest value.
      rounded: the bits of the operands in float8 as uint8, as far as they are known.
      weight: the operand whose blocks are those of weights, if any.
      gradient: the operand that is a gradient, if any.
      like: JAX's primitive, `dot_general` or `ragged_dot_general`.
    """
    operands, sizes = operands[:2], operands[2:]
    if sizes:
        recipe, operands = ragged.without_transform(recipe), ragged.masked(operands, sizes[0], params)
    this, none = passes_of(recipe).fwd, np.float32(1)
    formats = formats or [_value_format(this)] * 2
    *own_scales, third = scales
    if third is None:
        third = nvfp4.next_key() if needs_key(recipe) else none
    if this is None or has_blocks(this):
        own_scales = [none, none]
    contracted, batch = ragged.axes_of(params)
    if this != "fp8_rowwise":  # One for the whole, or for each of a batch: of experts, say.
        each = zip(operands, batch, strict=True)
        contracted = [[i for i in range(x.ndim) if i not in own] if own else None for x, own in each]
    scales = [
        scale_of(x, format, axes, per_device=bool(own)) if scale is None else scale
        for x, format, axes, own, scale in zip(
            unmarked or operands, formats, contracted, batch, own_scales, strict=True
        )
    ]
    if _keeps_scales(recipe):
        each = zip(operands, scales, formats, rounded, strict=True)
        rounded = [
            none if place == gradient else named_bits(x, scale, format, recipe == DELAYED) if q is None else q
            for place, (x, scale, format, q) in enumerate(each)
        ]
    rounded = [none if q is None else q for q in rounded]
    own = {"recipe": recipe, "formats": tuple(formats), "weight": weight, "gradient": gradient}
    return float8_like(like).bind(*operands, *scales, third, *rounded, *sizes, **own, **params)


def _keeps_scales(recipe: str) -> bool:
    """Whether the gradients' products take an operand as the forward pass has rounded it."""
    forward, backward = passes_of(recipe)
    return forward == backward and forward in _PER_TENSOR


def _jaxs_params(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in _OWN}


def _compute(
    like: Primitive, *operands: Any, on_cpu: bool = False, scaled: bool = False, **params: Any
) -> Any:
    """Computes the product.

    Args:
      like: JAX's primitive.
      operands: two arrays, which in float32 (a replay of the program) are multiplied as they are; their
        scales; the scale of the cotangent, or data of a key; both in float8, or numbers where that is not
        known; the sizes of groups, if the product has them.
      on_cpu: XLA's CPU compiler has no float8 products; those of bfloat16 operands are the same, bit for bit.
      scaled: whether the compiler has products with scales for blocks.
      params: of the primitive.
    """
    both, scales, sizes = operands[:2], operands[2:4], operands[7:]
    given, recipe, jaxs = params["formats"], passes_of(params["recipe"]).fwd, _jaxs_params(params)
    result = jaxs["preferred_element_type"] or both[0].dtype
    if recipe is None or None in given or not all(is_half(x.dtype) for x in both):
        return functions.primitive_for(like, both, jaxs).bind(*both, *sizes, **jaxs)
    if has_blocks(recipe):
        of_scales = nvfp4.SCALE if FLOAT4 in given else jnp.float8_e8m0fnu

        def product(lhs: Any, rhs: Any, third: Any) -> Any:
            both, of_types, rounded = (lhs, rhs), (given, of_scales), rounder(params, third, sizes)
            if sizes:
                sums = jaxs | {"preferred_element_type": jnp.dtype(jnp.float32)}
                values = ragged.rounded_in_place(both, rounded, jaxs)
                return like.bind(*values, *sizes, **sums).astype(result)
            return scaled_product(both, rounded, of_types, jaxs, out, scaled)

        out = like.abstract_eval(*map(jax.typeof, (*both, *sizes)), **jaxs)[0]
        return _on_any_mesh(product, out)(*both, operands[4])
    # Scales are powers of two, so that a result in bfloat16, with float32's range, is rounded to the same
    # value before as after. It is half as large.
    sums = result if not on_cpu and result == jnp.bfloat16 else jnp.float32
    jaxs["preferred_element_type"] = jnp.dtype(sums)
    values = [
        lax.bitcast_convert_type(bits, jnp.dtype(format))
        if bits.dtype == jnp.uint8
        else quantised(x, scale, format, saturates=recipe == DELAYED)
        for x, scale, format, bits in zip(both, scales, given, operands[5:7], strict=True)
    ]
    order = None
    if not sizes and _is_of_weight(given, jaxs):
        jaxs, order = _exchanged(values, jaxs)
        values, scales = values[::-1], scales[::-1]
    if on_cpu:
        values = [x.astype(jnp.bfloat16) for x in values]
    out = functions.primitive_for(like, values, jaxs).bind(*values, *sizes, **jaxs)
    if sizes:
        scales = ragged.scales_like_result(values, scales, sizes[0], jaxs)
    else:
        numbers = jaxs["dimension_numbers"]
        scales = [like_result(scale, place, out.ndim, numbers) for place, scale in enumerate(scales)]
    for scale in scales:
        out = out * scale.astype(out.dtype)
    return (out if order is None else lax.transpose(out, order)).astype(result)


def _on_any_mesh(product: Callable[..., Any], result: Any) -> Callable[..., Any]:
    """A product whose blocks may cross devices, where layouts are part of types."""
    mesh = result.sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return product
    return jax.sharding.auto_axes(product, out_sharding=result.sharding)


def rounder(params: dict[str, Any], key: Any, sizes: Sequence[Any]) -> Callable[[int, Any], Scaled]:
    """Returns what rounds an operand of a product with blocks, given which it is and its matrices.

    Args:
      params: of the primitive.
      key: data of the product's key.
      sizes: those of groups, if the product has them.
    """
    recipe, weight = passes_of(params["recipe"]).fwd or "", params["weight"]

    def by_blocks(place: int, x: Any) -> Scaled:
        return rounded_by_blocks(x, params["formats"][place], BLOCKS[recipe][place == weight])

    has_own = [bool(own) for own in ragged.axes_of(params)[1]]
    is_nvfp4 = recipe not in BLOCKS
    rounded = nvfp4.rounder(recipe, weight, params["gradient"], key, has_own) if is_nvfp4 else by_blocks
    return functools.partial(ragged.rounded_rows, rounded, sizes[0], params) if sizes else rounded


def lost_in_float8(eqn: Any, operands: Sequence[Any]) -> jax.Array:
    """Counts elements of the two operands of a float8 product.

    Args:
      eqn: the product.
      operands: all of its operands.

    Returns:
      float32 of shape (2, 3): for each operand how many elements it has, how many that are not zero become
      zero, and how many finite ones are beyond the range of their scale.
    """
    recipe = recipe_of(eqn)
    contracted, batch = ragged.axes_of(eqn.params)
    transforms = nvfp4.is_transformed(recipe, eqn.params["weight"], eqn.params["gradient"])
    found = []
    for place, format in enumerate(eqn.params["formats"]):
        x, scale = operands[place], operands[2 + place]
        largest = float(jnp.finfo(format).max)
        if has_blocks(recipe):
            x = as_matrices(x, contracted[place], batch[place])
            scaled = rounder(eqn.params, operands[4], operands[7:])(place, x)
            scale = scaled.scale_of_each if scaled.whole is None else scaled.scale_of_each * scaled.whole
            x = nvfp4.transformed(x) if transforms else x
            is_zero = scaled.values == 0
        else:
            is_zero = quantised(x, scale, format, saturates=recipe == DELAYED) == 0
        divided = x.astype(jnp.float32) / jnp.where(scale > 0, scale, jnp.inf)
        counted = is_zero & (x != 0), jnp.isfinite(x) & (jnp.abs(divided) > largest)
        found.append([jnp.float32(x.size), *(jnp.sum(each, dtype=jnp.float32) for each in counted)])
    return jnp.array(found)


def _is_of_weight(formats: Sequence[str], params: dict[str, Any]) -> bool:
    """Returns whether a product is that of a weight gradient: a cotangent, summed over its first axes."""
    (left, _), (left_batch, _) = params["dimension_numbers"]
    first = range(len(left_batch), len(left_batch) + len(left))
    return formats[0] == GRADIENT and sorted(left) == list(first)


def _exchanged(operands: Sequence[Any], params: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Returns the parameters of a product with its operands exchanged, and the axes that restore its result.

    JAX computes a weight gradient as the transpose of cotangent times input, where input times cotangent is
    the gradient as it is. XLA computes neither transpose, but gives the first the layout of its transpose,
    and with it all that shares its operands: the gradients of two Transformer layers of 1024 features then
    take 201 kernels instead of 185 and move 8 % more bytes of an H100 (JAX 0.12.0).
    """
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    batch, rank = len(left_batch), sum(x.ndim for x in operands) - 2 * len(left) - len(left_batch)
    split = operands[0].ndim - len(left)
    there = [*range(batch), *range(split, rank), *range(batch, split)]
    exchanged = {**params, "dimension_numbers": ((right, left), (right_batch, left_batch))}
    if (sharding := params["out_sharding"]) is not None:
        spec = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
        exchanged["out_sharding"] = sharding.update(spec=P(*(spec[axis] for axis in there)))
    return exchanged, sorted(range(rank), key=there.__getitem__)


def _differentiate(
    primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """Differentiates by the operands; scales count as constants, as everywhere in quantised training."""
    out = primitive.bind(*primals, **params)
    terms = []
    for place, tangent in enumerate(tangents[:2]):
        if not isinstance(tangent, ad.Zero):
            operands, formats = [*primals], [*params["formats"]]
            operands[place], operands[5 + place], formats[place] = tangent, np.float32(1), None
            terms.append(primitive.bind(*operands, **{**params, "formats": tuple(formats)}))
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(ad.add_tangents, terms)


def _transpose(like: Primitive, cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
    found: list[Any] = [None] * len(operands)
    place = next(i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand))
    if isinstance(cotangent, ad.Zero) or place > 1:
        found[place] = ad.Zero(operands[place].aval)
        return found
    other, known = operands[1 - place], params["formats"][1 - place]
    forward, recipe = passes_of(params["recipe"])
    sizes, jaxs = operands[7:], tuple(_jaxs_params(params).items())
    types = jax.typeof(cotangent), jax.typeof(other), operands[place].aval, *map(jax.typeof, sizes)
    jaxpr = functions.transposed_jaxpr(like, place, types, jaxs, jax.sharding.get_abstract_mesh())
    # No Tensor Core multiplies two gradients: where the other one is such, it is a second derivative. A block
    # needs no more range than e4m3 has.
    value = _value_format(recipe)
    format = value if known == GRADIENT or has_blocks(recipe) else GRADIENT
    keeps_scale = known is not None and forward == recipe and recipe in _PER_TENSOR
    is_rounded = keeps_scale and operands[6 - place].dtype == jnp.uint8
    of_other = known if known == GRADIENT and value == VALUE else value
    kept = operands[3 - place] if keeps_scale else None
    bits = operands[6 - place] if is_rounded else np.float32(1)
    new = operands[4] if recipe == DELAYED and format == GRADIENT else None
    if needs_key(recipe):
        nvfp4.check_key(operands[4])

    def product(eqn: Any, operands_and_sizes: Sequence[Any]) -> Any:
        values = operands_and_sizes[:2]
        if recipe is None or not all(is_half(value.dtype) for value in values):
            return functions.primitive_for(like, values, eqn.params).bind(*operands_and_sizes, **eqn.params)
        gradient = 1 if values[0] is other else 0
        own = {"weight": 1 - gradient if params["weight"] == 1 - place else None, "gradient": gradient}
        formats, scales, rounded = [of_other] * 2, [kept] * 2, [bits] * 2
        # One that is not known in 8 bits is rounded where it is multiplied.
        formats[gradient], scales[gradient], rounded[gradient] = format, new, np.float32(1)
        scales.append(operands[4])
        return bind_float8(
            operands_and_sizes, recipe, eqn.params, formats, scales, rounded=rounded, like=like, **own
        )

    found[place] = functions.evaluated(jaxpr, (cotangent, other, *sizes), product)
    return found


def _batch(
    like: Primitive, axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """Batches the product as JAX does; a scale per tensor is that of the whole batch."""
    if dims[4] is not None and dims[0] is dims[1] is None and needs_key(params["recipe"]):
        # Of equal operands under other keys each is rounded in its own way.
        operands = [jnp.broadcast_to(operands[0], (axis.size, *operands[0].shape)), *operands[1:]]
        dims = [0, *dims[1:]]
    scales, own = operands[2:5], {name: params[name] for name in _OWN}
    is_batched = [dim is not None for dim in dims[2:5]]

    def product(eqn: Any, values: Sequence[Any]) -> Any:
        if passes_of(own["recipe"]).fwd in _PER_TENSOR:
            # Experts, which have scales of their own, get new ones for each of the batch.
            ranks = (s.ndim - batched for s, batched in zip(scales, is_batched, strict=True))
            shared = [None if rank else jnp.max(s) for s, rank in zip(scales, ranks, strict=True)]
            return bind_float8(values, params=eqn.params, scales=shared, like=like, **own)
        if None in own["formats"]:  # Of a tangent; the other operand's scale is not used.
            none = [np.float32(1)] * 2
            given = (*values[:2], *scales, *none, *values[2:])
            return float8_like(like).bind(*given, **own, **eqn.params)
        # Of a key for each of the batch one will do: the bits are drawn for the whole.
        third = scales[2] if not is_batched[2] else jnp.moveaxis(scales[2], dims[4], 0)[0]
        return bind_float8(values, params=eqn.params, scales=(None, None, third), like=like, **own)

    arrays, own_dims = (*operands[:2], *operands[7:]), (*dims[:2], *dims[7:])
    return functions.batched_as(like, product, axis, arrays, own_dims, **_jaxs_params(params))


@functools.cache
def float8_like(like: Primitive) -> Primitive:
    """Makes the primitive of a product in few bits; one for each of JAX's.

    It has JAX's name and parameters, and four of its own: `recipe`, of this product and its gradients;
    `formats`, the dtype of each operand, None for a tangent; `weight` and `gradient`, which of them is one.
    """

    def abstract(lhs: Any, rhs: Any, *others: Any, **params: Any) -> Any:
        return like.abstract_eval(lhs, rhs, *others[5:], **_jaxs_params(params))

    def on_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
        compute = functools.partial(_compute, like, scaled=compat.is_for_one_device(ctx))
        return functions.lowered(compute)(ctx, *operands, **params)

    lowerings = {
        None: functions.lowered(functools.partial(_compute, like)),
        "cpu": functions.lowered(functools.partial(_compute, like, on_cpu=True)),
        "cuda": on_cuda,
    }
    primitive = functions.product_primitive(like, abstract, functools.partial(_batch, like), lowerings)
    ad.primitive_jvps[primitive] = functools.partial(_differentiate, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, like)
    return primitive
