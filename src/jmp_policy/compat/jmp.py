"""Offers the public names of DeepMind's `jmp`: a program written for it runs after one changed import.

::

    import jmp_policy.compat.jmp as jmp  # was: import jmp

Policies are those of this library: `wrap` and `autocast` take them. A program that moves on to `loss_scaled`
and `scaled_value_and_grad` should use this library's loss scales with them, which always return float32; the
ones here keep jmp's fields, and JAX's promotion.

What jmp 0.0.4 does not do on today's JAX, and this module does:

- A `DynamicLossScale` from a half or integer number, as jmp's own documentation has it, can be adjusted.
  Its state is float32 from the first step on, where jmp's changes type and compiles the step twice.
- `min_loss_scale` survives `jit`, `scan` and every other flattening. jmp goes back to 1.
- Loss scales can be lowered (`jax.jit(f).lower(scale)`), described by `jax.ShapeDtypeStruct`s and mapped to
  shardings.
- Integers and booleans are not scaled. Products and quotients are computed in float32 and rounded once.
- `str` of a policy works for dtypes however they were given. Texts may hold spaces and this library's words.

What differs, and could be seen:

- A policy's dtypes are `np.dtype` objects: equal to `jnp.float16`, but not the same object and not callable.
  `str(policy)` is the long form; `get_policy` of either library reads it.
- The number of a `StaticLossScale` is a leaf, so that another one does not compile again. Under `pmap` it is
  replicated with the rest of the state, or given `in_axes=None`.
- `min_loss_scale` is a number known before tracing. The scale stays between 2**-126 and 2**126, where it and
  its reciprocal are normal numbers; jmp lets it be 0, and 2**127.
- Loss scales are equal only to themselves. Compare their `loss_scale`.
- A cast to the dtype that an array has already returns the same array, also a weakly typed one.
- A key twice in a policy's text, a dtype that is not floating, a scale that is 0, infinite or NaN, and a
  period that is not a positive integer are `ValueError`s; a predicate that is no boolean scalar is a
  `TypeError`.
"""

from jmp_policy._src.api.jmp_names import DynamicLossScale as DynamicLossScale
from jmp_policy._src.api.jmp_names import LossScale as LossScale
from jmp_policy._src.api.jmp_names import NoOpLossScale as NoOpLossScale
from jmp_policy._src.api.jmp_names import StaticLossScale as StaticLossScale
from jmp_policy._src.api.jmp_names import cast_to_full as cast_to_full
from jmp_policy._src.api.jmp_names import cast_to_half as cast_to_half
from jmp_policy._src.api.jmp_names import get_policy as get_policy
from jmp_policy._src.api.jmp_names import half_dtype as half_dtype
from jmp_policy._src.api.jmp_names import select_tree as select_tree
from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.loss_scaling.gradients import all_finite as all_finite
from jmp_policy._src.policy.policy import Policy as Policy

__all__ = (
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
)

_publish(__name__, globals())
