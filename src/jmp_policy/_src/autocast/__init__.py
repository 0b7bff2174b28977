"""Op-level mixed precision for any JAX function: trace, plan, run."""
