"""Warns of weights that a governed method reads past the proxy it runs on, as they are stored.

A method reads its Params in compute dtype. Arrays that are no Params, `vars(self)`, `nnx.state(self)` and
stored values come as they are: float32. One float32 operand makes every result float32, and nothing says so.

    class Net(nnx.Module):             # self.w = jnp.ones(...), and not nnx.Param(jnp.ones(...))
        def __call__(self, x):         # x is float16
            return x @ self.w          # float32: noted when w is read, warned of when the result comes out

To read is no fault (a table of positions may be float32 on purpose), so the warning waits for a value that
is wider than compute dtype to leave the method, or to enter a module that it calls: once per model and
attribute.
"""

import contextlib
import dataclasses
import inspect
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from jmp_policy._src.core.dtypes import is_floating_array, is_half
from jmp_policy._src.flax.nnx import graph_nodes, told
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.rules import path_text

#: Functions of Flax that hand out what a module stores.
_READERS = frozenset({"state", "iter_graph", "iter_children", "pure", "as_pure", "to_pure_dict", "variables"})

_CAST = "cast what it gives (.astype(x.dtype)), or compute under jmp_policy.nnx.autocast"


@dataclasses.dataclass
class _Call:
    """A governed call that is running, and what its method has read as stored: attribute, and advice."""

    module: Any
    name: str
    precision: ModulePrecision
    reads: dict[str, str] = dataclasses.field(default_factory=dict)


class _Calls(threading.local):
    stack: tuple[_Call, ...] = ()


_CALLS = _Calls()


@contextlib.contextmanager
def watched(module: Any, name: str, precision: ModulePrecision) -> Iterator[None]:
    """Notes what a method of a module reads during a call."""
    before = _CALLS.stack
    _CALLS.stack = (*before, _Call(module, name, precision))
    try:
        yield
    finally:
        _CALLS.stack = before


def is_watching() -> bool:
    """Returns whether a governed call is running."""
    return bool(_CALLS.stack)


def warn_if_wide(values: Any) -> None:
    """Warns when values that leave the running method are wider than its policy says, and it is known why."""
    call = _CALLS.stack[-1] if _CALLS.stack else None
    if call is None or not call.reads:
        return
    if any(_is_wide(x, call.precision) for x in jax.tree.leaves(values, is_leaf=graph_nodes.is_node)):
        _warn(call)


def note_array(name: str, value: Any) -> None:
    """Notes that the running method reads an array, or a container with one, that no Variable holds."""
    if (call := _watching()) is None:
        return
    held = vars(value) if isinstance(value, nnx.List | nnx.Dict) else value
    for leaf in jax.tree.leaves(held, is_leaf=graph_nodes.is_node):
        if isinstance(leaf, jax.Array | np.ndarray) and _is_wide(leaf, call.precision):
            advice = f"Make it an nnx.Param, or cast it where it is used: self.{name}.astype(x.dtype)"
            call.reads[name] = f"self.{name} is an array and no nnx.Param. {advice}"


def note_attributes() -> None:
    """Notes that code reads the attributes of the module that runs, if that code is no part of Flax."""
    call = _watching()
    if call is None:
        return
    reader, caller = _caller(inspect.currentframe())
    if caller is None or (reader is not None and reader not in _READERS):
        return  # Flax takes modules apart for its transforms too, and puts governed ones together again.
    if _package(caller.f_globals) != type(call.module).__module__.partition(".")[0]:
        return  # Another library that looks around.
    names = [path_text(path) for path, _ in graph_nodes.own_params(call.module)]
    how = "vars(self)" if reader is None else f"nnx.{reader}(self)"
    if names or reader is not None:
        what = ", ".join(names) or "the parameters"
        call.reads[how] = f"{how} gives {what} as stored. Read parameters as attributes of self, or {_CAST}"


def note_stored(name: str) -> None:
    """Notes that code reads the stored value of a Param that the running method reads cast."""
    call = _watching()
    if call is None:
        return
    reader, caller = _caller(inspect.currentframe())
    if reader is None and caller is not None:
        code = f"{caller.f_globals.get('__name__')}.{caller.f_code.co_name}"
        call.reads[name] = f"{code} takes the stored value of a {name}. Read it as self.w[...], or {_CAST}"


def _watching() -> _Call | None:
    """Returns the call that is running, if it computes in half."""
    if not _CALLS.stack:
        return None
    call = _CALLS.stack[-1]
    return call if is_half(call.precision.used_param_dtype) else None


def _is_wide(x: Any, precision: ModulePrecision) -> bool:
    return is_floating_array(x) and x.dtype.itemsize > precision.compute_dtype.itemsize


def _package(variables: dict[str, Any]) -> str:
    return variables.get("__name__", "").partition(".")[0]


def _caller(frame: Any) -> tuple[str | None, types.FrameType | None]:
    """Returns the function of Flax that the user's code has called, if it is one, and the frame of that code.

    No frame where the library itself is the one who asks.

    Args:
      frame: of a function here, which a method of a proxy or view has called.
    """
    reader, frame = None, frame.f_back.f_back
    while frame is not None:
        package = _package(frame.f_globals)
        if package == __name__.partition(".")[0]:
            return reader, None
        if package not in ("flax", "jax", "contextlib", "copy"):
            return reader, frame
        reader, frame = frame.f_code.co_name.lstrip("_"), frame.f_back
    return reader, None


def _warn(call: _Call) -> None:
    outermost = _CALLS.stack[0].module
    new = told.new_for(outermost, [(call.name, what) for what in call.reads])
    if not new:
        return
    path = _path_to(outermost, call.module)
    where = f"{call.name} at {path!r}" if path else call.name
    policy = call.precision.policy
    stored = "; ".join(call.reads[what] for _, what in new)
    warnings.warn(
        f"{where} computes in float32, although its policy {str(policy)!r} says "
        f"{policy.compute_dtype.name}: {stored}. A float32 rule for the module says that it is meant.",
        UserWarning,
        stacklevel=5,
    )


def _path_to(root: Any, module: Any) -> str:
    """Returns the path of a module in the outermost one; empty where a transform has made a new one of it."""
    seen: set[int] = set()

    def find(node: Any, path: graph_nodes.Path) -> graph_nodes.Path | None:
        if node is module:
            return path
        for below, value in graph_nodes.children(node):
            if isinstance(value, nnx.Pytree) and id(value) not in seen:
                seen.add(id(value))
                if (found := find(value, (*path, *below))) is not None:
                    return found
        return None

    return path_text(find(root, ()) or ())
