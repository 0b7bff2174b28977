"""Arrays, dtypes and pytrees: knows nothing of policies, optimizers or Flax."""
