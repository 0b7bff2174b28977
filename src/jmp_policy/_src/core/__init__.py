"""Works on arrays, dtypes and pytrees, and knows nothing of policies, optimizers or Flax."""
