"""Op-level mixed precision for any JAX function.

`_interpreter` traces a function, `_plan` decides what runs in which dtype, `_run` runs the plan. What is
decided for each primitive is in `_ops` (the lists), `_operations` (what a list means), `_calls` and `_loops`
(operations with a jaxpr inside). `_explain` shows a plan.
"""
