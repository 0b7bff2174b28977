"""Puts Flax NNX modules under policies: `wrap`, and functions for training steps that take modules."""

from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.flax.nnx.accumulate import accumulate_gradients as accumulate_gradients
from jmp_policy._src.flax.nnx.autocast import autocast as autocast
from jmp_policy._src.flax.nnx.autocast import explain as explain
from jmp_policy._src.flax.nnx.governed import policy_of as policy_of
from jmp_policy._src.flax.nnx.spectrum import spectrum_value_and_grad as spectrum_value_and_grad
from jmp_policy._src.flax.nnx.train import keep_state_on_skip as keep_state_on_skip
from jmp_policy._src.flax.nnx.train import scaled_value_and_grad as scaled_value_and_grad
from jmp_policy._src.flax.nnx.wrap import cast_params as cast_params
from jmp_policy._src.flax.nnx.wrap import wrap as wrap
from jmp_policy._src.flax.nnx.wrap import wrap_part as wrap_part

_publish(__name__, globals())
