"""Wraps optax transformations: unscales gradients, tests them, and updates or skips the step."""

from jmp_policy._src.loss_scaling.loss_scaled import loss_scaled as loss_scaled
