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
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import tracers

from jmp_policy._src.core.cast import cast_floating, map_changed
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.flax.nnx import graph_nodes, layers
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.products.functions import stand_in
from jmp_policy._src.weight_grads.param_casts import cast_weight, wants_fp32_weight_grads

#: Types of attributes that hold no Variables, for which nobody should wait.
_PLAIN = frozenset(
    {int, float, bool, str, bytes, type(None), type, types.FunctionType, types.MethodType, np.dtype}
)

#: Attributes in which layers of Flax keep the products that they call.
_PRODUCTS = ("dot_general", "conv_general_dilated")

#: Held while classes are made: two threads that make one at a time would get two.
CLASSES = threading.RLock()


@dataclasses.dataclass
class Run:
    """One call of a governed method.

    Args:
      trace: the trace that the call began in; no longer current in the body of a transform.
      faces: every face handed out during the call, with the node it stands for.
      views: every view handed out, by the Variable's identity and what it is read by.
      containers: every list, tuple or dict handed out with views in it: the original, and its copy.
    """

    trace: Any = dataclasses.field(default_factory=tracers.TraceState)
    faces: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    views: dict[Any, Any] = dataclasses.field(default_factory=dict)
    containers: list[tuple[Any, Any, Any]] = dataclasses.field(default_factory=list)


class _Runs(threading.local):
    stack: tuple[Run, ...] = ()


_RUNS = _Runs()


def is_loop_body() -> bool:
    """Whether a loop of JAX's (`lax.scan`, `nnx.scan`, while loops) runs this inside a governed call.

    Such a body must return its carry in the dtype it came in. Other transforms must not change dtypes, and
    all look alike from inside, but for the frames of the code that traces the body.
    """
    if not _RUNS.stack or _RUNS.stack[-1].trace.is_valid():
        return False
    frame: Any = sys._getframe(1)
    runs = 0
    while frame is not None and runs < 2:
        if os.path.basename(frame.f_code.co_filename) == "loops.py" and "jax" in frame.f_code.co_filename:
            return True
        runs += frame.f_code.co_name == "entry" and frame.f_globals.get("__package__") == __package__
        frame = frame.f_back
    return False


@contextlib.contextmanager
def opened(module: Any, bare: type, precision: ModulePrecision, class_dtype: Any) -> Iterator[Any]:
    """The face of a module for the length of a call.

    Args:
      module: the module.
      bare: its class without a policy.
      precision: by which its own Params are read.
      class_dtype: what a `dtype` that its class defines is read as; None to leave it.
    """
    run, face = Run(), _face(module, bare, precision, class_dtype)
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
    """A value with the Variables and nodes themselves in place of views and faces of them.

    Nodes that were made during the call, and took views or faces up, are put right in place.
    """
    seen: set[int] = set()

    def one(leaf: Any) -> Any:
        if isinstance(leaf, _View):
            return leaf._jmp_policy_origin
        if not isinstance(leaf, nnx.Pytree) or id(leaf) in seen:
            return leaf
        outer = getattr(type(leaf), "_jmp_policy_face_of", None)
        if outer is not None:
            for run in _RUNS.stack:
                for face, node in run.faces:
                    if face is leaf:
                        return node
            object.__setattr__(leaf, "__class__", outer)  # A copy that the method made of itself.
        seen.add(id(leaf))
        attributes = vars(leaf)
        for name, attribute in list(attributes.items()):
            if type(attribute) not in _PLAIN and not name.startswith("_pytree__"):
                new = map_changed(one, attribute, graph_nodes.is_node)
                if new is not attribute:
                    attributes[name] = new
        return leaf

    return map_changed(one, value, graph_nodes.is_node)


def _face(node: Any, bare: type, precision: ModulePrecision, class_dtype: Any = None) -> Any:
    with CLASSES:
        cls = _face_class(bare, type(node), precision, class_dtype)
    face = object.__new__(cls)
    object.__setattr__(face, "__dict__", vars(node))
    return face


@functools.cache
def _face_class(bare: Any, outer: type, precision: ModulePrecision, class_dtype: Any) -> type:
    dtype = precision.used_param_dtype

    def getattribute(self: Any, name: str) -> Any:
        value = bare.__getattribute__(self, name)
        if type(value) in _PLAIN:
            return stand_in(value, precision.compute_dtype) if name in _PRODUCTS else value
        if name.startswith(("__", "_pytree__")) or name not in object.__getattribute__(self, "__dict__"):
            return value
        return _seen(bare, name, value, precision)

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
        "_jmp_policy_face_of": outer,
    }
    if class_dtype is not None:
        namespace["dtype"] = class_dtype
    return subclass(bare, namespace)


def subclass(bare: Any, namespace: dict[str, Any], **keywords: Any) -> type:
    """A subclass of an NNX class, of the same name, that is a pytree where that one is."""
    if not bare._pytree__is_pytree and not issubclass(bare, nnx.Object):
        keywords["pytree"] = False
    return types.new_class(bare.__name__, (bare,), keywords, lambda ns: ns.update(namespace))


def _seen(bare: type, name: str, value: Any, precision: ModulePrecision) -> Any:
    """An attribute as the methods of a module see it."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            return _view(leaf, precision) if _is_read_cast(bare, name, leaf, precision) else leaf
        if isinstance(leaf, nnx.Pytree) and _is_holder(leaf):
            spec = getattr(type(leaf), "_jmp_policy_specification", None)
            inner = getattr(type(leaf), "_jmp_policy_bare", type(leaf))
            new = _face(leaf, inner, precision if spec is None else spec.precision)
            if _RUNS.stack:
                _RUNS.stack[-1].faces.append((new, leaf))
            return new
        return leaf

    return _shown(value, one)


def _shown(value: Any, one: Callable[[Any], Any]) -> Any:
    """A value with `one` of every node in it; copies of lists and dicts are noted, at every depth."""
    if graph_nodes.is_node(value):
        return one(value)
    if not isinstance(value, list | dict | tuple):
        return map_changed(one, value, graph_nodes.is_node)
    containers = _RUNS.stack[-1].containers if _RUNS.stack else []
    for before, handed_out, _ in containers:
        if before is value:
            return handed_out
    keys = list(value) if isinstance(value, dict) else range(len(value))
    parts = [_shown(value[key], one) for key in keys]
    if all(part is value[key] for key, part in zip(keys, parts, strict=True)):
        return value
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    new = copy.copy(value)
    for key, part in zip(keys, parts, strict=True):
        new[key] = part
    containers.append((value, new, copy.copy(new)))
    return new


def _is_read_cast(bare: type, name: str, variable: nnx.Variable, precision: ModulePrecision) -> bool:
    """Whether a module reads a Variable of its own in another dtype than it is stored in.

    Layers of Flax cast theirs themselves; where gradients are to be float32, the cast must be ours.
    """
    if issubclass(bare, nnx.MultiHeadAttention) and name in ("cached_key", "cached_value"):
        return True
    by_itself = layers.is_flax(bare) and not issubclass(bare, nnx.List | nnx.Dict)
    by_itself = by_itself and not wants_fp32_weight_grads(precision.policy)
    return isinstance(variable, nnx.Param) and not by_itself


def _is_holder(node: nnx.Pytree) -> bool:
    """Whether a node is no module that is called, but holds Params for the one that holds it."""
    if isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict):
        return False
    return any(
        graph_nodes.is_floating(value) if isinstance(value, nnx.Param) else _is_holder(value)
        for _, value in graph_nodes.children(node)
        if isinstance(value, nnx.Param | nnx.Pytree)
    )


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
    stored = graph_nodes.dtypes(before)
    if len(stored) == 1 and graph_nodes.dtypes(new) == {dtype}:
        graph_nodes.write(new, cast_floating(graph_nodes.read(new), next(iter(stored))))


class _View:
    """What views of Variables have in common, and are told by."""

    __slots__ = ()
    _jmp_policy_origin: Any


def _view(variable: nnx.Variable, precision: ModulePrecision) -> nnx.Variable:
    """A Variable that is `variable`, but for reading in another dtype."""
    if isinstance(variable, _View):
        variable = variable._jmp_policy_origin  # The innermost decides.
    if graph_nodes.dtypes(variable) <= {precision.used_param_dtype}:
        return variable
    known, key = _RUNS.stack[-1].views if _RUNS.stack else {}, (id(variable), precision)
    if key not in known:
        with CLASSES:
            cls: Any = _view_class(variable.var_type, precision)
        view = object.__new__(cls)
        object.__setattr__(view, "_jmp_policy_origin", variable)
        known[key] = view
    return known[key]


@functools.cache
def _view_class(base: Any, precision: ModulePrecision) -> type[nnx.Variable]:
    def get_value(self: Any, **kwargs: Any) -> Any:
        return cast_weight(base.get_value(self, **kwargs), precision.used_param_dtype, precision.policy)

    def set_value(self: Any, value: Any, **kwargs: Any) -> None:
        _warn_if_rounded(self._jmp_policy_origin, value)
        stored = graph_nodes.dtypes(self)
        base.set_value(self, cast_floating(value, *stored) if len(stored) == 1 else value, **kwargs)

    def copy_from(self: Any, other: Any) -> None:
        self._jmp_policy_origin.copy_from(original(other))

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
        "_var_metadata": property(_metadata, _set_metadata),
        "_trace_state": property(_trace_state),
        "var_type": property(lambda self: base),
        "type": property(lambda self: base),
        "copy_from": copy_from,
        "__copy__": lambda self: self._jmp_policy_origin.copy(),
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


def _set_metadata(view: Any, metadata: dict[str, Any]) -> None:
    view._jmp_policy_origin._var_metadata = metadata


def _trace_state(view: Any) -> Any:
    origin = view._jmp_policy_origin
    return tracers.TraceState() if origin.get_metadata().get("hijax") else origin._trace_state


def _warn_if_rounded(variable: nnx.Variable, value: Any) -> None:
    if not isinstance(variable, nnx.Param):
        return  # Caches are written with what has been computed.
    stored = {np.dtype(d) for d in graph_nodes.dtypes(variable)}
    written = {np.dtype(x.dtype) for x in jax.tree.leaves(value) if is_half(getattr(x, "dtype", None))}
    if written and not stored <= written:
        warnings.warn(
            f"A {variable.var_type.__name__} stored in {next(iter(stored)).name} was overwritten with values "
            f"computed in {next(iter(written)).name}, which rounds it for good. Give the module a float32 "
            "rule, or update its parameters outside of the calls that the policy governs.",
            UserWarning,
            stacklevel=4,
        )
