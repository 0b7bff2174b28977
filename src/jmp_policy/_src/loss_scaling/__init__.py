"""Loss scales, the optax wrapper that uses them, gradients of scaled losses, accumulation, metrics."""
