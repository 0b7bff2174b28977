"""Policies for Flax Linen modules: `wrap`, and the interceptor behind it."""

from jmp_policy.linen._intercept import intercept as intercept
from jmp_policy.linen._wrap import policy_of as policy_of
from jmp_policy.linen._wrap import wrap as wrap
from jmp_policy.linen._wrap import wrap_part as wrap_part
