"""What is special about Flax's own NNX layers: their settings, the float32 islands, the recurrent cells."""

import dataclasses
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jmp_policy._src.core.classes import is_instance_of
from jmp_policy._src.core.dtypes import has_complex, is_complex_or_integer, is_dtype_or_none, is_half
from jmp_policy._src.flax.nnx import graph_nodes
from jmp_policy._src.flax.nnx.attention import as_in_flax, with_float32_softmax
from jmp_policy._src.policy.module_precision import LEAST_TERMS
from jmp_policy._src.policy.patterns import path_text
from jmp_policy._src.policy.recipes import check_has_no_state
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.products.functions import is_jaxs_own

#: Layers that normalise activations: statistics and arithmetic in float32, results in compute dtype.
NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)

#: Layers that normalise the weights of another layer, in place: the master weights themselves.
WEIGHT_NORMS = (nnx.SpectralNorm, nnx.WeightNorm)

#: Positions above 2048 are no float16 numbers.
POSITIONS: tuple[type, ...] = (vars(nnx)["RoPE"],) if hasattr(nnx, "RoPE") else ()

#: Modules of Flax that hold others and compute nothing themselves.
_CONTAINERS = (nnx.Sequential, nnx.List, nnx.Dict, nnx.Dropout, nnx.RNN, nnx.Bidirectional, *WEIGHT_NORMS)

#: Of those, the ones whose results come from layers that return compute dtype.
_PASS_ON = (nnx.RNN, nnx.Bidirectional, *WEIGHT_NORMS)

#: Layers that cast Params of their own, under these names and no others.
WITH_OWN_PARAMS = (
    nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose, nnx.Embed, nnx.LoRA, *NORMS,
)  # fmt: skip
OWN_PARAMS = frozenset({"kernel", "bias", "scale", "embedding", "lora_a", "lora_b"})


#: Layers with one product of inputs and a kernel.
HAVE_PRODUCTS = (nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose)


def is_island(module: nnx.Pytree) -> bool:
    """Whether a layer computes in float32 by default; subclasses of Flax's layers too."""
    return isinstance(module, (*NORMS, *WEIGHT_NORMS, *POSITIONS))


def is_flax(cls: type) -> bool:
    """Whether a class is Flax's own, so that it is known what it does with its settings."""
    return cls.__module__.startswith("flax.nnx.")


def is_users_function(value: Any) -> bool:
    """Whether a value is a function, or another callable, that is no class and not written in JAX or Flax."""
    if not callable(value) or isinstance(value, type) or graph_nodes.is_node(value):
        return False
    is_theirs = str(getattr(value, "__module__", "")).startswith(("jax.", "flax."))
    return not (is_theirs and isinstance(value, types.FunctionType))


def params_of_others(module: nnx.Module) -> tuple[str, ...]:
    """Names of Params that others have put into a layer of Flax (LoRA adapters), which casts its own only."""
    if not isinstance(module, WITH_OWN_PARAMS):
        return ()
    held = ((name, value) for name, value in vars(module).items() if name not in OWN_PARAMS)
    return tuple(name for name, value in held if isinstance(value, nnx.Param))


def linen_modules(module: nnx.Pytree) -> dict[str, Any]:
    """The Linen modules among a module's attributes, as bridges of other libraries hold them."""
    return {
        name: value for name, value in vars(module).items() if is_instance_of(value, "flax.linen", "Module")
    }


def sums_few(module: nnx.Module) -> bool:
    """Whether the product of a layer sums too few numbers to gain from half precision."""
    if not isinstance(module, HAVE_PRODUCTS):
        return False
    given = module.in_features
    size = math.prod(given) if isinstance(given, tuple) else given
    if isinstance(module, nnx.Conv | nnx.ConvTranspose) and size < LEAST_TERMS:
        # A depthwise convolution with more channels sums few numbers as well, but reads a large array.
        size *= math.prod(module.kernel_size)
    return size < LEAST_TERMS


def has_few_results(module: nnx.Module) -> bool:
    """Whether the results of a layer with a product have few features."""
    made: Any = getattr(module, "out_features", LEAST_TERMS)
    return (math.prod(made) if isinstance(made, tuple) else made) < LEAST_TERMS


def follows_by_itself(module: nnx.Module) -> bool:
    """Whether settings alone make a module compute, and return values, as the policy says.

    True for Flax's layers with a `dtype`, with exceptions: recurrent cells return the wider of compute and
    carry dtype, attention writes into a cache that may have any dtype, and products may be asked for
    another one.
    """
    if not is_flax(type(module)) or isinstance(module, nnx.RNNCellBase | nnx.MultiHeadAttention):
        return False
    if vars(module).get("preferred_element_type") is not None or params_of_others(module):
        return False
    return isinstance(module, (*_CONTAINERS, nnx.bridge.ToNNX)) or "dtype" in vars(module)


def passes_on(module: nnx.Module) -> bool:
    """Whether the results of a module are those of modules that it holds, in their dtype."""
    if isinstance(module, nnx.Sequential):
        last = module.layers[-1] if len(module.layers) else None
        # Flax's and JAX's activation functions keep the dtype; of others nobody knows.
        return isinstance(last, nnx.Module) or getattr(last, "__module__", "").startswith(("jax.", "flax."))
    return isinstance(module, _PASS_ON)


@dataclasses.dataclass(frozen=True)
class InFloat32:
    """A norm's `promote_dtype` that takes parameters and statistics to float32 at least.

    So everything they meet is float32: Flax's norms cast nothing else before the result. The inputs stay as
    they came, so that what is saved of them for the backward pass is not twice as large.
    """

    promote: Callable[..., Any]

    def __call__(self, args: tuple[Any, ...], /, *, dtype: Any = None, **kwargs: Any) -> Any:
        """The arguments, all but the first in float32 or wider; `dtype` is left to the result."""
        inputs, *rest = args
        wide = jnp.result_type(jnp.float32, *(x for x in rest if x is not None))
        return (inputs, *self.promote(tuple(rest), dtype=wide, **kwargs))


@dataclasses.dataclass(frozen=True, eq=False)
class WithComplex:
    """A layer's `promote_dtype` that leaves out the layer's `dtype` where a value is complex.

    It equals the function that it stands for, so that graph definitions equal those of layers whose `dtype`
    was set by hand.
    """

    promote: Callable[..., Any]

    def __call__(self, args: tuple[Any, ...], /, *, dtype: Any = None, **kwargs: Any) -> Any:
        """The arguments in one dtype: that which was asked for, or a complex one."""
        return self.promote(args, dtype=None if has_complex(args) else dtype, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self.promote == (other.promote if isinstance(other, WithComplex) else other)

    def __hash__(self) -> int:
        return hash(self.promote)


def has_uncast_params(module: nnx.Module) -> bool:
    """Whether a layer has parameters that no policy casts: complex ones, or integers."""
    asked, values = vars(module).get("param_dtype"), vars(module).values()
    held = [getattr(value.get_value(), "dtype", None) for value in values if isinstance(value, nnx.Param)]
    try:
        return any(map(is_complex_or_integer, (asked, *held)))
    except TypeError:  # An attribute that happens to be called so.
        return False


def settings(planned: Any, rules: PolicyMap, last: frozenset[str]) -> dict[str, Any]:
    """The static attributes that make a layer follow a policy, as far as it has them.

    Args:
      planned: the layer, and what the rules mean for it (`precision_plan.PlannedModule`).
      rules: of the model.
      last: the last blocks of the model, where a recipe asks for them.
    """
    module, precision, keeps_dtype = planned.module, planned.precision, planned.keeps_dtype
    attributes, new, is_norm = vars(module), {}, isinstance(module, NORMS)
    follows = "dtype" in attributes and is_dtype_or_none(attributes["dtype"]) and not keeps_dtype
    # Flax casts what a layer computes with to its `dtype`, complex numbers too.
    if follows and not has_uncast_params(module):
        # Weight normalisations store what they compute, and would round the master weights for good.
        stores = isinstance(module, WEIGHT_NORMS)
        in_float32 = stores or (precision.island and isinstance(module, HAVE_PRODUCTS))
        new["dtype"] = scalar_type(precision.param_dtype if in_float32 else precision.compute_dtype)
    if "promote_dtype" in attributes:
        if is_norm and precision.island and not keeps_dtype:
            new["promote_dtype"] = InFloat32(attributes["promote_dtype"])
        elif "dtype" in new and not is_norm:
            new["promote_dtype"] = WithComplex(attributes["promote_dtype"])
    # Without islands too in float16: Flax's own function does not compile for it on a CPU.
    in_float32 = rules.float32_islands or precision.compute_dtype == jnp.float16
    if in_float32 and is_half(precision.compute_dtype) and "attention_fn" in attributes:
        new["attention_fn"] = with_float32_softmax(attributes["attention_fn"])
    given = attributes.get("dot_general", False)
    is_default = given is lax.dot_general or (given is None and isinstance(module, WITH_OWN_PARAMS))
    has_recipe = precision.policy.recipe is not None and attributes.get("dot_general_cls") is None
    if has_recipe and is_default and is_jaxs_own(lax.dot_general):
        # Few models have such products.
        from jmp_policy._src.products.fp8.functions import Float8DotGeneral

        if recipe := precision.recipe_at(path_text(planned.path), attributes.get("out_features"), last):
            check_has_no_state(recipe, "NNX")
            new["dot_general"] = Float8DotGeneral(recipe, precision.recipe_is_asked_for, given)
    return new


def without_settings(module: nnx.Module) -> dict[str, Any]:
    """The static attributes as they were before `settings`, for those that it may have changed."""
    attributes, old = vars(module), {}
    if "dtype" in attributes and is_dtype_or_none(attributes["dtype"]):
        old["dtype"] = own_dtype(module)
    if isinstance(attributes.get("promote_dtype"), InFloat32 | WithComplex):
        old["promote_dtype"] = attributes["promote_dtype"].promote
    if hasattr(attributes.get("dot_general"), "instead_of"):  # By a recipe.
        old["dot_general"] = attributes["dot_general"].instead_of
    if "attention_fn" in attributes:
        old["attention_fn"] = as_in_flax(attributes["attention_fn"])
    return old


def scalar_type(dtype: np.dtype) -> Any:
    """A dtype as users write it (`jnp.float16`), so that graph definitions equal theirs."""
    return getattr(jnp, dtype.name, dtype)


#: Identity of a wrapped layer -> (reference to it, the dtype it had, the dtype it was given). Not an
#: attribute of the layer, whose graph definition would no longer be that of one written by hand.
_OVERRULED: dict[int, tuple[Any, Any, Any]] = {}


def remember_own_dtype(module: nnx.Module, own: Any, given: Any) -> None:
    """Notes the `dtype` that a layer was made with, for when this very layer gets another policy."""
    key = id(module)
    _OVERRULED[key] = (weakref.ref(module, lambda _: _OVERRULED.pop(key, None)), own, given)


def own_dtype(module: nnx.Module) -> Any:
    """The `dtype` that a layer was made with, or that was set on it since."""
    now = vars(module).get("dtype")
    reference, own, given = _OVERRULED.get(id(module), (lambda: None, None, None))
    return own if reference() is module and now is given else now


def asked_dtype(module: nnx.Module, holder: Any) -> Any:
    """The dtype that a module asks for itself; None if it does not.

    `nnx.Embed` and `nnx.SimpleCell` say float32 where nobody said anything.
    """
    dtype = getattr(module, "dtype", None)
    if dtype is None or not is_dtype_or_none(dtype):
        return None
    if isinstance(module, nnx.Embed) and dtype in (module.embedding.dtype, module.param_dtype):
        return None
    if any(isinstance(m, nnx.SimpleCell) and m.dtype == jnp.float32 for m in (module, holder)):
        return None
    return dtype
