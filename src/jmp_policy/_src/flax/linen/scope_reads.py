"""Parameters that a Linen module reads by `self.scope.get_variable`: cast, as those by `self.param` are."""

import functools
import inspect
import weakref
from typing import Any

import flax.linen as nn

from jmp_policy._src.flax.linen.governing import module_precision
from jmp_policy._src.policy.scope import ACTIVE
from jmp_policy._src.weight_grads.param_casts import cast_weight


def cast_scope_reads(scope: Any, module: nn.Module) -> None:
    """Replaces what reads parameters on a scope of Flax and its children, which live as long as one `apply`.

    By weak references: a scope that holds itself would keep arrays alive.
    """
    if "get_variable" in vars(scope):
        return
    refs = weakref.ref(scope), weakref.ref(module)
    vars(scope)["get_variable"] = functools.partial(_get_variable, *refs)
    for name in ("push", "rewound"):  # Scopes of children, and the one that a module has after a call.
        vars(scope)[name] = functools.partial(_made, name, *refs)


def _get_variable(of_scope: Any, of_module: Any, col: str, name: str, default: Any = None) -> Any:
    scope, module, active = of_scope(), of_module(), ACTIVE.value
    value = type(scope).get_variable(scope, col, name, default)
    if col != "params" or active is None or module is None or _is_read_by_flax(inspect.currentframe()):
        return value  # What Flax reads for a module, the module casts.
    precision = module_precision(active, module)
    return cast_weight(value, precision.used_param_dtype, precision.policy)


def _is_read_by_flax(frame: Any) -> bool:
    return frame.f_back.f_globals.get("__name__", "").startswith("flax.")


def _made(name: str, of_scope: Any, of_module: Any, *args: Any, **kwargs: Any) -> Any:
    scope, module = of_scope(), of_module()
    new = getattr(type(scope), name)(scope, *args, **kwargs)
    if module is not None:
        cast_scope_reads(new, module)
    return new
