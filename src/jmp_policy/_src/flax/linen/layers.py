"""What is special about Flax's own Linen layers: float32 islands, recurrent cells, products and attention."""

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core import dtypes
from jmp_policy._src.flax.linen.attention import attention
from jmp_policy._src.policy.module_precision import LEAST_TERMS, ModulePrecision, Shapes, shapes_of
from jmp_policy._src.policy.scope import Scope
from jmp_policy._src.products.functions import is_jaxs_own, stand_in

#: Layers that normalise activations: statistics and arithmetic in float32, results in compute dtype.
NORMS = (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)

#: Layers that normalise the weights of another layer: they return weights, which that layer casts.
WEIGHT_NORMS = (nn.SpectralNorm, nn.WeightNorm)

#: Layers that compute in float32 by default; subclasses of them too.
ISLANDS = (*NORMS, *WEIGHT_NORMS)

#: Layers that are one product.
PRODUCTS = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, nn.ConvTranspose, nn.ConvLocal)

#: Layers whose field `dot_general` stands for JAX's when unset.
_HAVE_DOT_GENERAL = (nn.Dense, nn.DenseGeneral)
#: Layers whose input features can be few.
_SUM_FEATURES = (*_HAVE_DOT_GENERAL, nn.Conv, nn.ConvLocal)


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module takes a carry and returns it with its output: cells, and what `nn.scan` makes."""
    return isinstance(module, nn.RNNCellBase) or _is_scanned(type(module))


@functools.cache
def _is_scanned(cls: type) -> bool:
    lifted = (c.__name__ for c in cls.__mro__ if c.__module__ == nn.scan.__module__)
    return any(name.startswith("Scan") for name in lifted)


def own_params(module: nn.Module) -> Shapes:
    """Shapes of the parameters of a module itself, without those of modules inside of it."""
    if module.is_initializing():
        return None if _makes_params(type(module)) else ()
    params = all_params(module).values()
    return shapes_of(nn.meta.unbox(x) for x in params if not isinstance(x, Mapping))


def all_params(module: nn.Module) -> Mapping[str, Any]:
    """The parameters of a module and of those inside of it, as far as there are any yet."""
    assert module.scope is not None
    return module.scope.variables().get("params", {})


@functools.cache
def _makes_params(cls: type[nn.Module]) -> bool:
    """Whether the code of a class names `param`, as it must to make parameters of its own."""
    own = [c for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    functions = (inspect.unwrap(value) for c in own for value in vars(c).values() if callable(value))
    codes = [f.__code__ for f in functions if hasattr(f, "__code__")]
    while codes:
        code = codes.pop()
        if {"param", "variable"} & {*code.co_names}:
            return True
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return False


def sums_few(module: nn.Module, precision: ModulePrecision, args: Any, kwargs: Any) -> bool:
    """Whether a layer's product sums too few numbers to gain from half precision.

    Depthwise convolutions do as well, but read large arrays.
    """
    if not (isinstance(module, _SUM_FEATURES) and precision.keeps_small_inputs) or precision.island:
        return False
    x = next(iter((*args, *kwargs.values())), None)
    if not dtypes.is_half(precision.compute_dtype) or not isinstance(x, dtypes.ARRAYS) or not x.shape:
        return False
    size = x.shape[-1]
    if isinstance(module, nn.DenseGeneral):
        axes = module.axis if isinstance(module.axis, Sequence) else (module.axis,)
        size = math.prod(x.shape[axis] for axis in axes)
    elif not isinstance(module, nn.Dense) and size < LEAST_TERMS:
        kernel = module.kernel_size
        size *= math.prod(kernel) if isinstance(kernel, Sequence) else kernel
    return size < LEAST_TERMS


def has_few_results(module: Any) -> bool:
    """Whether the results of a layer with a product have few features."""
    features = module.features
    return (math.prod(features) if isinstance(features, Sequence) else features) < LEAST_TERMS


#: Attribute of a module that is running: whether its product sums too few numbers for half precision.
IN_FLOAT32 = "_jmp_policy_in_float32"

#: Attribute of a module that is running: the fields that its policy overrides, as they were.
ORIGINAL = "_jmp_policy_original"


def original_fields(module: nn.Module) -> dict[str, Any]:
    """The fields of a module that are overridden just now, as they were; empty if none are."""
    return module.__dict__.get(ORIGINAL, {})


def own_dtype(module: Any) -> Any:
    """A module's `dtype` as it would be without a policy, for one that computes with complex numbers."""
    original = original_fields(module.parent if has_dtype_of_parent(module) else module)
    return original.get("dtype", module.dtype)


def has_dtype_of_parent(module: Any) -> bool:
    """Whether a module's `dtype` is the one that its parent has by its policy."""
    parent: Any = module.parent
    if not isinstance(parent, nn.Module) or "dtype" not in original_fields(parent):
        return False
    return parent.dtype == module.dtype != original_fields(parent)["dtype"]


@functools.cache
def _field_names(cls: type[nn.Module]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls))


def overridden_fields(
    module: nn.Module, precision: ModulePrecision, scope: Scope, path: str, inputs: Any
) -> dict[str, Any]:
    """The fields that make a layer follow its policy, for those that it has.

    Args:
      module: a module that is called.
      precision: what the rules mean for it.
      scope: the active one.
      path: where it is, as rules count paths; "" will do where its policy has no recipe.
      inputs: what it is called with.
    """
    fields, new, rules = _field_names(type(module)), {}, scope.rules
    if "dtype" in fields:
        own = module.dtype  # type: ignore[attr-defined]
        is_real = not (_has_uncast_params(module) or dtypes.has_complex(inputs))
        if own is None or not rules.keep_module_dtypes:
            if dtypes.is_dtype_or_none(own):
                # Flax casts what a layer computes with to its `dtype`, complex numbers too.
                new["dtype"] = _dtype_field(module, precision) if is_real else own_dtype(module)
            if precision.island and "force_float32_reductions" in fields:
                new["force_float32_reductions"] = True
        if is_real and rules.float32_islands and dtypes.is_half(precision.compute_dtype):
            is_attention = isinstance(module, nn.MultiHeadDotProductAttention)
            if is_attention and module.attention_fn is nn.dot_product_attention:
                new["attention_fn"] = attention
    if "dot_general" in fields:
        new.update(_dot_general_field(module, precision, path, scope.last))
    return new


def _has_uncast_params(module: nn.Module) -> bool:
    """Whether a layer asks for parameters that no policy casts: complex ones, or integers."""
    try:
        return dtypes.is_complex_or_integer(getattr(module, "param_dtype", None))
    except TypeError:  # A field that happens to be called so.
        return False


def _dtype_field(module: nn.Module, precision: ModulePrecision) -> Any:
    # The weights that a weight normalisation returns are stored as the layer's own at init.
    if not precision.island or isinstance(module, NORMS):
        return precision.compute_dtype
    return precision.policy.param_dtype if isinstance(module, WEIGHT_NORMS) else precision.used_param_dtype


def _dot_general_field(
    module: Any, precision: ModulePrecision, path: str, last: frozenset[str]
) -> dict[str, Any]:
    """The matrix product of a layer, where it differs from JAX's; one that the layer was given stays."""
    jaxs, given = lax.dot_general, module.dot_general
    # What the layer had before it was given a recipe: the module above hands its own on.
    now = getattr(given, "instead_of", given)
    is_default = isinstance(module, _HAVE_DOT_GENERAL) and now is None
    if not (is_default or now is jaxs) or getattr(module, "dot_general_cls", None) is not None:
        return {}
    # Only for bfloat16 is there another one.
    ours = stand_in(jaxs, jnp.bfloat16) if precision.compute_dtype == jnp.bfloat16 else jaxs
    recipe = precision.recipe_at(path, getattr(module, "features", None), last)
    if recipe and is_jaxs_own(jaxs):
        from jmp_policy._src.flax.linen.float8 import float8_product  # Few models have float8 products.

        ours = float8_product(module, recipe, precision.recipe_is_asked_for, now)
    return {"dot_general": ours} if ours is not jaxs or given is not now else {}
