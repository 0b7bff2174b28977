"""Parameters that a Linen module reads past `self.param` and `self.get_variable`.

`self.scope.get_variable("params", name)` is cast as they are. `self.variables` and `child.variables` are
whole trees, which may be handed to `apply` (and are cast there), counted, or summed up in float32 on purpose.
They come out as stored. A warning says so, once, if then an array of float32 leaves the method, or is the
first argument of a module that it calls: what the parameters were multiplied with.
"""

import contextlib
import dataclasses
import functools
import inspect
import linecache
import re
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core.dtypes import is_floating_array, is_half
from jmp_policy._src.flax.linen.governing import module_precision
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.policy.scope import Scope, current
from jmp_policy._src.weight_grads.param_casts import cast_weight

#: A line that looks at another collection, or asks only what there is.
_OTHER = re.compile(r"""variables(\(\))?(\[|\.get\()\s*["'](?!params["'])|\bin\s+[\w.]*variables\b""")

#: The name of this package.
_OURS = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Read:
    """Place in the user's code that read `variables`, of which module, and whether float32 came of it."""

    path: tuple[str, ...]
    file: str
    line: int
    params: list[Any] = dataclasses.field(compare=False)
    spreads: bool = dataclasses.field(default=False, compare=False)


@contextlib.contextmanager
def watched(scope: Scope, module: nn.Module, precision: ModulePrecision) -> Iterator[list[Read] | None]:
    """Watches the variables of a module and its children for the length of a call; yields what is read.

    Yields None where nothing is lost: in `init`, and in modules that use parameters as they are stored.
    """
    if module.is_initializing() or not is_half(precision.used_param_dtype):
        yield None
        return
    reads: list[Read] = []
    _watch(module.scope, module)
    yield reads
    for read in (read for read in reads if read.spreads):
        _warn_once(scope.rules, type(module), module.path, dataclasses.replace(read, params=[]), precision)


def hand_on(scope: Scope, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Forgets what the caller of a module has read, where the module gets it, and so casts it.

    Args:
      scope: the scope of the caller.
      module: what is called: the root of an `apply` inside of a method, or any other.
      args, kwargs: what it is called with.
    """
    if scope.reads:
        given = {id(x) for x in jax.tree.leaves((args, kwargs))}
        kept = [r for r in scope.reads if module.path and given.isdisjoint(map(id, r.params))]
        scope.reads[:] = kept
        note_wide(scope, args[:1])


def note_wide(scope: Scope | None, values: Any) -> None:
    """Notes that values leave code that has read parameters; arrays of float32 may have come of these."""
    if scope is not None and scope.reads:
        wide = any(is_floating_array(x) and x.ndim and not is_half(x.dtype) for x in jax.tree.leaves(values))
        scope.reads[:] = [dataclasses.replace(read, spreads=read.spreads or wide) for read in scope.reads]


def _watch(scope: Any, module: nn.Module) -> None:
    """Replaces what reads variables on a scope of Flax, which lives as long as one `apply`.

    By weak references: a scope that holds itself would keep arrays alive.
    """
    if "variables" in vars(scope):
        return
    reads = {
        "variables": _variables,
        "get_variable": _get_variable,
        # Those of children, and the one that a module has after a call.
        "push": functools.partial(_made, "push"),
        "rewound": functools.partial(_made, "rewound"),
    }
    refs = weakref.ref(scope), weakref.ref(module)
    vars(scope).update({name: functools.partial(read, *refs) for name, read in reads.items()})


def _variables(of_scope: Any, of_module: Any) -> Any:
    scope, active = of_scope(), current()
    found = type(scope).variables(scope)
    if active is not None and active.reads is not None:
        frame = _reader()
        params = jax.tree.leaves(found.get("params", {}))
        stored = any(is_floating_array(x) and not is_half(x.dtype) for x in params)
        if stored and frame is not None and not _OTHER.search(linecache.getline(*frame)):
            active.reads.append(Read(scope.path, *frame, params))
    return found


def _get_variable(of_scope: Any, of_module: Any, col: str, name: str, default: Any = None) -> Any:
    scope, module, active = of_scope(), of_module(), current()
    value = type(scope).get_variable(scope, col, name, default)
    if col != "params" or active is None or module is None or active.reads is None or _reader() is None:
        return value
    precision = module_precision(active, module)
    return cast_weight(value, precision.used_param_dtype, precision.policy)


def _made(name: str, of_scope: Any, of_module: Any, *args: Any, **kwargs: Any) -> Any:
    scope, module = of_scope(), of_module()
    new = getattr(type(scope), name)(scope, *args, **kwargs)
    if module is not None:
        _watch(new, module)
    return new


def _reader() -> tuple[str, int] | None:
    """Returns file and line of the code that reads a scope; None if it is Flax's or JAX's own."""
    frame = inspect.currentframe()
    while frame is not None and (_package(frame) == _OURS or frame.f_code.co_name == "variables"):
        frame = frame.f_back  # The property of `nn.Module`, and our `__getattribute__` of a wrapped one.
    if frame is None or _package(frame) in ("flax", "jax"):
        return None
    return frame.f_code.co_filename, frame.f_lineno


def _package(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


@functools.cache
def _warn_once(
    rules: PolicyMap, cls: type, path: tuple[str, ...], read: Read, precision: ModulePrecision
) -> None:
    """Warns of a read; equal ones under equal rules once."""
    where = f"{cls.__name__} at {'/'.join(path)!r}" if path else cls.__name__
    whose = "self.variables" if read.path == path else f"the variables of {'/'.join(read.path)!r}"
    half = precision.compute_dtype.name
    warnings.warn_explicit(
        f"{where} computes in {half} and reads {whose}. Parameters that are read there are not cast: what "
        'they are multiplied with becomes float32. Read them with self.get_variable("params", name) or '
        "self.param, in a method of the module that owns them, or cast them (.astype(x.dtype)).",
        UserWarning,
        read.file,
        read.line,
    )
