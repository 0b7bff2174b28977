"""Puts Flax Linen modules under policies: `wrap`, and the interceptor behind it."""

import typing as _typing

from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.core.public import publish_later as _publish_later
from jmp_policy._src.flax.linen.wrapped import wrap as wrap

_publish(__name__, globals())

if _typing.TYPE_CHECKING:
    from jmp_policy._src.api.train_state import TrainState as TrainState
    from jmp_policy._src.flax.linen.framework import intercept as intercept
    from jmp_policy._src.flax.linen.framework import policy_of as policy_of
    from jmp_policy._src.flax.linen.framework import wrap_part as wrap_part
else:
    __getattr__, __dir__ = _publish_later(
        __name__,
        globals(),
        {
            "jmp_policy._src.api.train_state": ["TrainState"],
            "jmp_policy._src.flax.linen.framework": ["intercept", "policy_of", "wrap_part"],
        },
    )
