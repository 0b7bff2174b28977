"""What is special about Flax's own Linen layers: the float32 islands and the recurrent cells."""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.linen import recurrent

#: Layers that normalise activations: statistics and arithmetic in float32, the compute dtype handed on.
NORMS = (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)

#: Layers that normalise the weights of another layer: they hand on weights, which that layer casts.
WEIGHT_NORMS = (nn.SpectralNorm, nn.WeightNorm)


def is_island(module: nn.Module) -> bool:
    """Whether a layer computes in float32 by default; subclasses of Flax's layers too."""
    return isinstance(module, (*NORMS, *WEIGHT_NORMS))


def keeps_carry(module: nn.Module) -> bool:
    """Whether a layer is a recurrent cell of Flax, whose `dtype` leaves the carry alone.

    Its cell state then accumulates in float32, as it does when the cell is written with `dtype=float16`;
    only the products are in half.
    """
    if not isinstance(module, nn.RNNCellBase):
        return False
    # A lifted class (nn.scan(nn.LSTMCell)) inherits the method of the cell it was made from.
    return type(module).__call__.__module__ == recurrent.__name__


def field_overrides(module: nn.Module, compute: np.dtype, island: bool) -> dict[str, Any]:
    """The fields that make a layer compute in `compute`, for those that it has and that differ."""
    fields = type(module).__dataclass_fields__
    new: dict[str, Any] = {}
    if "dtype" in fields and _is_dtype_or_none(module.dtype):  # type: ignore[attr-defined]
        new["dtype"] = np.dtype(jnp.float32) if isinstance(module, WEIGHT_NORMS) and island else compute
    if island and "force_float32_reductions" in fields:
        new["force_float32_reductions"] = True
    return new


def attention_overrides(module: nn.Module) -> dict[str, Any]:
    """Attention with its softmax in float32, where the layer uses Flax's own attention function."""
    if (
        isinstance(module, nn.MultiHeadDotProductAttention)
        and module.attention_fn is nn.dot_product_attention
    ):
        return {"attention_fn": _attention_with_float32_softmax}
    return {}


def _is_dtype_or_none(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, str) and value not in ("float16", "bfloat16", "float32", "float64"):
        return False  # A field that happens to be called dtype.
    try:
        return bool(jnp.issubdtype(jnp.dtype(value), jnp.floating))
    except TypeError:
        return False


@functools.wraps(nn.dot_product_attention)
def _attention_with_float32_softmax(
    query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """`nn.dot_product_attention` whose second product is in the compute dtype again.

    `force_fp32_for_softmax=True` alone leaves the weights float32, and the product with the values a
    mixed float16 x float32 one, which no Tensor Core takes. The einsum casts the weights back.
    """
    names = ("bias", "mask", "broadcast_dropout", "dropout_rng", "dropout_rate", "deterministic")
    kwargs.update(zip(names, args, strict=False))
    kwargs["force_fp32_for_softmax"] = True
    precision = kwargs.pop("precision", None)
    dot_general = kwargs.pop("einsum_dot_general", None)
    einsum = functools.partial(
        jnp.einsum, precision=precision, **({"_dot_general": dot_general} if dot_general else {})
    )
    weights_value = kwargs.pop("attn_weights_value_einsum", None) or einsum
    query_key = kwargs.pop("qk_attn_weights_einsum", None) or einsum

    def weights_back_in_compute(equation: str, weights: Any, value: Any) -> Any:
        return weights_value(equation, weights.astype(value.dtype), value)

    return nn.dot_product_attention(
        query,
        key,
        value,
        qk_attn_weights_einsum=query_key,
        attn_weights_value_einsum=weights_back_in_compute,
        **kwargs,
    )
