"""Reports what runs in which precision, where gradients vanish, and what the compilers make of a program."""

import typing as _typing

from jmp_policy._src.autocast.explanation import Explanation as Explanation
from jmp_policy._src.autocast.explanation import Operation as Operation
from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.core.public import publish_later as _publish_later
from jmp_policy._src.policy.frameworks import tap as tap
from jmp_policy._src.policy.recipes import worthwhile as worthwhile

_publish(__name__, globals())

if _typing.TYPE_CHECKING:
    from jmp_policy._src.api.reports import *  # noqa: F403
else:
    __getattr__, __dir__ = _publish_later(__name__, globals(), {"jmp_policy._src.api.reports": None})
