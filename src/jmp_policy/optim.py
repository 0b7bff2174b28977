"""The optax wrapper: unscale, test, update or skip."""

from jmp_policy._src.loss_scaling.loss_scaled import loss_scaled as loss_scaled
