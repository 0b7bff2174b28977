"""Jaxprs: how they differ between versions of JAX, one evaluator, lists of operations, replay in float32."""
