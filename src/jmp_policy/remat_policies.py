"""Policies for `jax.checkpoint`, `nn.remat` and `nnx.remat`, beside those of `jax.checkpoint_policies`."""

from collections.abc import Callable as _Callable

import jax as _jax

from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.products.fp8.scales import QUANTISED as _QUANTISED

#: Keeps the operands of float8 products in 8 bits, and computes the rest again. Recipes with one scale per
#: tensor have such, `fp8_current` and `fp8_delayed`. Combine it with another policy by
#: `jax.checkpoint_policies.save_from_both_policies`.
save_quantised: _Callable[..., bool] = _jax.checkpoint_policies.save_only_these_names(_QUANTISED)

_publish(__name__, globals())
