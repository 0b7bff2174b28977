"""Parameters that a Linen module reads past `self.param`, as `self.scope.get_variable` and `self.variables`.

Those by `self.scope.get_variable` are cast, as those by `self.param` are. Others come out as they are stored,
and where one makes a product float32, a warning says so (see `float32_products`).
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.imported import is_instance_of
from jmp_policy._src.flax import float32_products
from jmp_policy._src.flax.linen.governing import Location, locate, module_precision
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.rules import path_text
from jmp_policy._src.policy.scope import ACTIVE, Scope
from jmp_policy._src.weight_grads.param_casts import cast_weight

#: What to do about a variable that is used as it is stored.
_REPAIR = (
    'Read it with self.param or self.get_variable("params", name) in a method of the module that owns it, '
    "or cast it (.astype(x.dtype))."
)


def watched(scope: Scope, module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Warns of float32 products with variables that the outermost module's call reads as they are stored."""
    return float32_products.watched(scope.model(), functools.partial(_stored, scope, module), _REPAIR)


def _stored(scope: Scope, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The variables of the outermost module, and those below it, that belong to modules in half precision.

    A module that has not run belongs to the next one above it.
    """
    start, half_modules = locate(module, scope.location).path, scope.half_modules
    for keys, array in jax.tree_util.tree_leaves_with_path(nn.meta.unbox(module.variables)):
        collection, *names = (str(getattr(key, "key", key)) for key in keys)
        path = (*start, *names)
        owner = next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in half_modules)
        if half_modules[owner]:
            text = path_text(path)
            yield text if collection == "params" else f"{text} of {collection}", array


def cast_scope_reads(scope: Scope, module: nn.Module, precision: ModulePrecision, location: Location) -> None:
    """Casts what a module that is called reads by its scope, and notes whether it is in half precision."""
    in_half = is_half(precision.used_param_dtype)
    # An NNX module looks at its variables itself.
    is_bridge = "nnx_class" in module.__dict__ and is_instance_of(module, "flax.nnx.bridge", "ToLinen")
    scope.half_modules[location.path] = in_half and not is_bridge
    if in_half:
        _replace_reads(module.scope, module)


def _replace_reads(scope: Any, module: nn.Module) -> None:
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
        _replace_reads(new, module)
    return new
