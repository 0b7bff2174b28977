"""What is special about Flax's own Linen layers: the float32 islands and the recurrent cells."""

import dataclasses
from typing import Any

import flax.linen as nn
from jax import lax

from jmp_policy._src.core.dtypes import is_complex_or_integer, is_dtype_or_none
from jmp_policy._src.flax.linen.attention import attention
from jmp_policy._src.flax.linen.delayed_scaling import DelayedDotGeneral
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import DELAYED, passes_of
from jmp_policy._src.products.fp8.functions import Float8DotGeneral, without_recipe
from jmp_policy._src.products.functions import is_jaxs_own, stand_in

#: Layers that normalise activations: statistics and arithmetic in float32, results in compute dtype.
NORMS = (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)

#: Layers that normalise the weights of another layer: they return weights, which that layer casts.
WEIGHT_NORMS = (nn.SpectralNorm, nn.WeightNorm)

#: Layers whose products are fields, and the fields with the functions that they stand for when unset.
_HAS_PRODUCTS = (nn.Dense, nn.DenseGeneral, nn.Conv, nn.ConvLocal)
_PRODUCTS = {"dot_general": lax.dot_general, "conv_general_dilated": lax.conv_general_dilated}


def is_island(module: nn.Module) -> bool:
    """Returns whether a layer computes in float32 by default; subclasses of Flax's layers too."""
    return isinstance(module, (*NORMS, *WEIGHT_NORMS))


def keeps_carry(module: nn.Module) -> bool:
    """Returns whether a layer is a recurrent cell of Flax, whose `dtype` leaves the carry alone.

    Its cell state then accumulates in float32, as it does when the cell is written with `dtype=float16`;
    only the products are in half.
    """
    if not isinstance(module, nn.RNNCellBase):
        return False
    # A lifted class (nn.scan(nn.LSTMCell)) inherits the method of the cell it was made from.
    return type(module).__call__.__module__ == nn.RNNCellBase.__module__


def has_uncast_params(module: nn.Module) -> bool:
    """Returns whether a layer asks for parameters that no policy casts: complex ones, or integers."""
    asked = getattr(module, "param_dtype", None)
    try:
        return is_complex_or_integer(asked)
    except TypeError:  # A field that happens to be called so.
        return False


def field_overrides(module: nn.Module, policy: Policy, island: bool) -> dict[str, Any]:
    """Returns the fields that make a layer follow a policy, for those that it has."""
    fields = {field.name for field in dataclasses.fields(module)}
    new: dict[str, Any] = {}
    if "dtype" in fields and is_dtype_or_none(module.dtype):  # type: ignore[attr-defined]
        # The weights that a weight normalisation returns are stored as the layer's own at init.
        returns_weights = island and isinstance(module, WEIGHT_NORMS)
        new["dtype"] = policy.param_dtype if returns_weights else policy.compute_dtype
    if island and "force_float32_reductions" in fields:
        new["force_float32_reductions"] = True
    return new


def product_overrides(module: nn.Module, precision: ModulePrecision, path: str) -> dict[str, Any]:
    """Returns the products of a layer of Flax's, where they differ from JAX's.

    A layer that was given a function or class for them keeps it.

    Args:
      module: the layer.
      precision: what the rules mean for it.
      path: where it is, as rules count paths.
    """
    new, recipe = {}, precision.recipe_at(path)
    for field, function in _PRODUCTS.items():
        given = getattr(module, field, None)
        now = without_recipe(given)  # Of the module above, which hands its own on.
        is_default = isinstance(module, _HAS_PRODUCTS) and now is None
        if (is_default or now is function) and getattr(module, f"{field}_cls", None) is None:
            ours = stand_in(function, precision.compute_dtype)
            if recipe and function is lax.dot_general and is_jaxs_own(function):
                kind = DelayedDotGeneral if DELAYED in passes_of(recipe) else Float8DotGeneral
                ours = kind(recipe, precision.recipe_is_asked_for, now)
            if ours is not function or given is not now:
                new[field] = ours
    fields = {field.name for field in dataclasses.fields(module)}
    return {field: ours for field, ours in new.items() if field in fields}


def attention_overrides(module: nn.Module) -> dict[str, Any]:
    """Returns attention with its softmax in float32, where the layer uses Flax's own function."""
    if (
        isinstance(module, nn.MultiHeadDotProductAttention)
        and module.attention_fn is nn.dot_product_attention
    ):
        return {"attention_fn": attention}
    return {}
