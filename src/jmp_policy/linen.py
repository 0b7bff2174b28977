"""Puts Flax Linen modules under policies: `wrap`, and the interceptor behind it."""

from jmp_policy._src.api.train_state import TrainState as TrainState
from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.flax.linen.framework import intercept as intercept
from jmp_policy._src.flax.linen.framework import policy_of as policy_of
from jmp_policy._src.flax.linen.framework import wrap_part as wrap_part
from jmp_policy._src.flax.linen.wrapped import wrap as wrap

_publish(__name__, globals())
