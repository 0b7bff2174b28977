"""The inside of a governed module: the same attributes, with every Param read in compute dtype.

A face is another object over the very `__dict__` of a module, so nothing can be stale, and what a method
assigns is assigned to the module. Only reading differs: a Param comes out as a view, a Variable that stores
in the original and reads its cast. The cast happens where the value is read; inside `nnx.remat`, what is
saved is the parameter and not a second copy of it.
"""

import contextlib
import copy
import dataclasses
import functools
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import tracers

from jmp_policy._cast import cast_floating, map_changed
from jmp_policy._dtypes import is_half
from jmp_policy.nnx import _graph, _layers

#: Held while classes are made: two threads that make one at a time would get two.
CLASSES = threading.RLock()


@dataclasses.dataclass
class Run:
    """One call of a governed method.

    Args:
      trace: the trace that the call began in; no longer current in the body of a transform.
      faces: every face handed out during the call, with the node it stands for.
      containers: every list, tuple or dict handed out with views in it: the original, and its copy.
    """

    trace: Any = dataclasses.field(default_factory=tracers.TraceState)
    faces: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    containers: list[tuple[Any, Any, Any]] = dataclasses.field(default_factory=list)


class _Runs(threading.local):
    stack: tuple[Run, ...] = ()


_RUNS = _Runs()


def is_lifted() -> bool:
    """Whether a transform (nnx.scan, nnx.vmap, nnx.remat) runs this code for the governed call around it."""
    return bool(_RUNS.stack) and not _RUNS.stack[-1].trace.is_valid()


@contextlib.contextmanager
def opened(module: Any, bare: type, dtype: np.dtype, class_dtype: Any) -> Iterator[Any]:
    """The face of a module for the length of a call.

    Args:
      module: the module.
      bare: its class without a policy.
      dtype: what its own Params are read in.
      class_dtype: what a `dtype` that its class defines is read as; None to leave it.
    """
    run, face = Run(), _face(module, bare, dtype, class_dtype)
    run.faces.append((face, module))
    before = _RUNS.stack
    _RUNS.stack = (*before, run)
    try:
        yield face
    finally:
        _RUNS.stack = before
        for container, handed_out, as_it_was in run.containers:
            _bring_back(container, handed_out, as_it_was)


def original(value: Any) -> Any:
    """A value with the Variables and nodes themselves in place of views and faces of them."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, _View):
            return leaf._jmp_policy_origin
        if getattr(type(leaf), "_jmp_policy_is_face", False):
            return next((node for run in _RUNS.stack for face, node in run.faces if face is leaf), leaf)
        return leaf

    return map_changed(one, value, _graph.is_node)


def _face(node: Any, bare: type, dtype: np.dtype, class_dtype: Any = None) -> Any:
    face = object.__new__(_face_class(bare, dtype, class_dtype))
    object.__setattr__(face, "__dict__", vars(node))
    return face


def _face_class(bare: type, dtype: np.dtype, class_dtype: Any) -> type:
    with CLASSES:
        return _made_face_class(bare, dtype, class_dtype)


@functools.cache
def _made_face_class(bare: Any, dtype: np.dtype, class_dtype: Any) -> type:
    def getattribute(self: Any, name: str) -> Any:
        value = bare.__getattribute__(self, name)
        if name.startswith(("__", "_pytree__")) or name not in object.__getattribute__(self, "__dict__"):
            return value
        return _seen(bare, name, value, dtype)

    def setattribute(self: Any, name: str, value: Any) -> None:
        if isinstance(value, dataclasses.Field) and "nnx_value" in value.metadata:
            annotate = nnx.static if value.metadata["static"] else nnx.data
            value = annotate(original(value.metadata["nnx_value"]))
        else:
            value = original(value)
        before = vars(self).get(name)
        if isinstance(before, nnx.Param) and isinstance(value, nnx.Param) and value is not before:
            _keep_dtype(value, before, dtype)
        bare._setattr(self, name, value)

    namespace: dict[str, Any] = {
        "__module__": bare.__module__,
        "__qualname__": bare.__qualname__,
        "__doc__": bare.__doc__,
        "__getattribute__": getattribute,
        "_setattr": setattribute,
        "_jmp_policy_is_face": True,
    }
    if class_dtype is not None:
        namespace["dtype"] = class_dtype
    return subclass(bare, namespace)


def subclass(bare: Any, namespace: dict[str, Any], **keywords: Any) -> type:
    """A subclass of an NNX class, of the same name, that is a pytree where that one is."""
    if not bare._pytree__is_pytree and not issubclass(bare, nnx.Object):
        keywords["pytree"] = False
    return types.new_class(bare.__name__, (bare,), keywords, lambda ns: ns.update(namespace))


def _seen(bare: type, name: str, value: Any, dtype: np.dtype) -> Any:
    """An attribute as the methods of a module see it."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            return _view(leaf, dtype) if _is_read_cast(bare, name, leaf) else leaf
        if isinstance(leaf, nnx.Pytree) and _is_holder(leaf):
            spec = getattr(type(leaf), "_jmp_policy_specification", None)
            inner = getattr(type(leaf), "_jmp_policy_bare", type(leaf))
            read_in = dtype if spec is None else spec.treatment.used_param_dtype
            new = _face(leaf, inner, read_in)
            if _RUNS.stack:
                _RUNS.stack[-1].faces.append((new, leaf))
            return new
        return leaf

    if _graph.is_node(value):
        return one(value)
    is_mutable = isinstance(value, list | dict) and bool(_RUNS.stack)
    if is_mutable:
        for before, handed_out, _ in _RUNS.stack[-1].containers:
            if before is value:
                return handed_out
    new = map_changed(one, value, _graph.is_node)
    if is_mutable and new is not value:
        _RUNS.stack[-1].containers.append((value, new, copy.copy(new)))
    return new


def _is_read_cast(bare: type, name: str, variable: nnx.Variable) -> bool:
    """Whether a module reads a Variable of its own in another dtype than it is stored in."""
    if issubclass(bare, nnx.MultiHeadAttention) and name in ("cached_key", "cached_value"):
        return True
    by_itself = _layers.is_flax(bare) and not issubclass(bare, nnx.List | nnx.Dict)
    return isinstance(variable, nnx.Param) and not by_itself


def _is_holder(node: nnx.Pytree) -> bool:
    """Whether a node is no module that is called, but holds Params for the one that holds it."""
    if isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict):
        return False
    return next(_graph.own_params(node), None) is not None


def _bring_back(container: Any, handed_out: Any, as_it_was: Any) -> None:
    """Repeats on a list or dict what was done to the copy that was handed out."""
    if isinstance(container, list):
        if [*map(id, handed_out)] != [*map(id, as_it_was)]:
            container[:] = [original(value) for value in handed_out]
    elif {key: id(value) for key, value in handed_out.items()} != {k: id(v) for k, v in as_it_was.items()}:
        new = {key: original(value) for key, value in handed_out.items()}
        container.clear()
        container.update(new)


def _keep_dtype(new: nnx.Param, before: nnx.Param, dtype: np.dtype) -> None:
    """A Param assigned in place of another is stored as that was, if it was made from cast values."""
    stored = _graph.dtypes(before)
    if len(stored) == 1 and _graph.dtypes(new) == {dtype}:
        _graph.write(new, cast_floating(_graph.read(new), next(iter(stored))))


class _View:
    """What views of Variables have in common, and are told by."""

    __slots__ = ()
    _jmp_policy_origin: Any


def _view(variable: nnx.Variable, dtype: np.dtype) -> nnx.Variable:
    """A Variable that is `variable`, but for reading in another dtype."""
    if isinstance(variable, _View):
        variable = variable._jmp_policy_origin  # The innermost decides.
    if _graph.dtypes(variable) <= {dtype}:
        return variable
    with CLASSES:
        cls: Any = _view_class(variable.var_type, dtype)
    view = object.__new__(cls)
    object.__setattr__(view, "_jmp_policy_origin", variable)
    return view


@functools.cache
def _view_class(base: Any, dtype: np.dtype) -> type[nnx.Variable]:
    def get_value(self: Any, **kwargs: Any) -> Any:
        return cast_floating(base.get_value(self, **kwargs), dtype)

    def set_value(self: Any, value: Any, *, index: Any = ..., **kwargs: Any) -> None:
        if index is not ...:
            base.set_value(self, value, index=index, **kwargs)
            return
        _warn_if_rounded(self._jmp_policy_origin, value)
        stored = _graph.dtypes(self)
        base.set_value(self, cast_floating(value, *stored) if len(stored) == 1 else value, **kwargs)

    def getattribute_of_value(self: Any, name: str) -> Any:
        if name.startswith("_") or name in self._var_metadata:
            return base.__getattr__(self, name)
        return getattr(self.get_value(), name)

    def new(cls: Any, value: Any, metadata: dict[str, Any]) -> Any:
        view = object.__new__(cls)
        object.__setattr__(view, "_jmp_policy_origin", base._new(value, metadata))
        return view

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__slots__": ("_jmp_policy_origin",),
        "_raw_value": property(_raw_value, lambda self, value: self._jmp_policy_origin.set_raw_value(value)),
        "_var_metadata": property(_metadata),
        "_trace_state": property(_trace_state),
        "_new": classmethod(new),
        "get_value": get_value,
        "set_value": set_value,
        "__getattr__": getattribute_of_value,
    }
    return types.new_class(base.__name__, (_View, base), {}, lambda ns: ns.update(namespace))


def _raw_value(view: Any) -> Any:
    return view._jmp_policy_origin.get_raw_value()


def _metadata(view: Any) -> dict[str, Any]:
    origin = view._jmp_policy_origin
    metadata = origin.get_metadata()
    return {**metadata, "hijax": False} if metadata.get("hijax") else origin._var_metadata


def _trace_state(view: Any) -> Any:
    origin = view._jmp_policy_origin
    return tracers.TraceState() if origin.get_metadata().get("hijax") else origin._trace_state


def _warn_if_rounded(variable: nnx.Variable, value: Any) -> None:
    if not isinstance(variable, nnx.Param):
        return  # Caches are written with what has been computed.
    stored = {np.dtype(d) for d in _graph.dtypes(variable)}
    written = {np.dtype(x.dtype) for x in jax.tree.leaves(value) if is_half(getattr(x, "dtype", None))}
    if written and not stored <= written:
        warnings.warn(
            f"A {variable.var_type.__name__} stored in {next(iter(stored)).name} was overwritten with values "
            f"computed in {next(iter(written)).name}, which rounds it for good. Give the module a float32 "
            "rule, or update its parameters outside of the calls that the policy governs.",
            UserWarning,
            stacklevel=4,
        )
