"""Scales losses: loss scales, the optax wrapper that uses them, scaled gradients, accumulation, metrics."""
