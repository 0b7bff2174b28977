"""Op-level mixed precision for any JAX function.

`_interpreter` traces a function, `_plan` decides what runs in which dtype, `_run` runs the plan. What is
decided for each primitive is in `_ops` (the lists), `_operations` (what a list means), `_calls` and `_loops`
(operations with a jaxpr inside). `_explain` shows a plan.
"""

from jmp_policy._autocast._explain import Explanation as Explanation
from jmp_policy._autocast._explain import Operation as Operation
from jmp_policy._autocast._explain import explain as explain
from jmp_policy._autocast._interpreter import autocast as autocast
from jmp_policy._autocast._interpreter import autocast_policy as autocast_policy
