"""Puts Flax NNX modules under policies: `wrap`, and functions for training steps that take modules."""

import typing as _typing

from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.core.public import publish_later as _publish_later
from jmp_policy._src.flax.nnx import attention as _attention
from jmp_policy._src.flax.nnx import governed as _governed
from jmp_policy._src.flax.nnx.layers import InFloat32 as _InFloat32
from jmp_policy._src.flax.nnx.layers import WithComplex as _WithComplex
from jmp_policy._src.flax.nnx.model_state import accumulate_gradients as accumulate_gradients
from jmp_policy._src.flax.nnx.model_state import keep_state_on_skip as keep_state_on_skip
from jmp_policy._src.flax.nnx.train import scaled_value_and_grad as scaled_value_and_grad
from jmp_policy._src.flax.nnx.wrap_module import wrap as wrap
from jmp_policy._src.policy.module_precision import ModulePrecision as _ModulePrecision

_publish(
    __name__,
    globals(),
    # What wrapped modules and their graph definitions consist of, besides what is the user's own: how to make
    # a module's class again, and the settings of Flax's layers.
    also=[
        _governed.governed_class,
        _governed.Specification,
        _ModulePrecision,
        _InFloat32,
        _WithComplex,
        _attention.attention,
        _attention.attention_with_rope,
    ],
)

if _typing.TYPE_CHECKING:
    from jmp_policy._src.api.nnx_optimizer import Optimizer as Optimizer
    from jmp_policy._src.flax.nnx.framework import cast_params as cast_params
    from jmp_policy._src.flax.nnx.framework import policy_of as policy_of
    from jmp_policy._src.flax.nnx.framework import wrap_part as wrap_part
    from jmp_policy._src.flax.nnx.states import autocast as autocast
    from jmp_policy._src.flax.nnx.states import explain as explain
    from jmp_policy._src.report.spectrum.of_nnx import spectrum_value_and_grad as spectrum_value_and_grad
else:
    __getattr__, __dir__ = _publish_later(
        __name__,
        globals(),
        {
            "jmp_policy._src.api.nnx_optimizer": ["Optimizer"],
            "jmp_policy._src.flax.nnx.states": ["autocast", "explain"],
            "jmp_policy._src.flax.nnx.framework": ["cast_params", "policy_of", "wrap_part"],
            "jmp_policy._src.report.spectrum.of_nnx": ["spectrum_value_and_grad"],
        },
    )
