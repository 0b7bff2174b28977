"""The inside of a governed module: the same attributes, with every Param read in compute dtype.

A method of a governed module runs on a proxy: another object, of a subclass of the module's class, whose
`__dict__` is the module's own.

    class Net(nnx.Module):          # net.w = nnx.Param(...), in float32
        def __call__(self, x):      # self is the proxy: vars(self) is vars(net)
            self.calls += 1         # read from and written to the very dictionary of net
            return x @ self.w       # __getattribute__ finds the Param there, and gives a view of it: float16
    assert net.calls == 1           # nothing is copied, so nothing can be stale

Only reading differs. A Param comes out as a view (`param_view`), a Variable that stores in the Param and
reads its cast; an object that holds Params for the module comes out as a proxy; lists and dicts with such
things in them come out as copies, and what is done to these is repeated when the call ends. What is assigned
or returned is the Param or object itself. The cast happens where the value is read; inside `nnx.remat`, what
is saved is the parameter and not a second copy of it.
"""

import contextlib
import copy
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax.extend.core
from flax import nnx

from jmp_policy._src.core.dtypes import map_changed
from jmp_policy._src.core.subclass import make_subclass
from jmp_policy._src.flax import compat
from jmp_policy._src.flax.nnx import graph_nodes, layers, new_params, uncast
from jmp_policy._src.flax.nnx.param_view import CLASSES, view
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.products.functions import stand_in
from jmp_policy._src.weight_grads.param_casts import wants_fp32_weight_grads

#: Attributes in which layers of Flax keep the products that they call.
_PRODUCTS = ("dot_general", "conv_general_dilated")


def _current_trace() -> Any:
    """Returns what is equal as long as no transform of JAX begins or ends."""
    return jax.extend.core.get_opaque_trace_state(convention="nnx")


@dataclasses.dataclass
class Run:
    """One call of a governed method.

    Args:
      trace: the trace that the call began in; no longer current in the body of a transform.
      proxies: every proxy handed out during the call, with the node it stands for.
      views: every view handed out, by the Variable's identity and what it is read by.
      containers: every list, tuple or dict handed out with views in it: the original, and its copy.
      known: the Params and modules that the module held before, and those stored since.
    """

    trace: Any = dataclasses.field(default_factory=_current_trace)
    proxies: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    views: dict[Any, Any] = dataclasses.field(default_factory=dict)
    containers: list[tuple[Any, Any, Any]] = dataclasses.field(default_factory=list)
    known: dict[int, Any] = dataclasses.field(default_factory=dict)


class _Runs(threading.local):
    stack: tuple[Run, ...] = ()


_RUNS = _Runs()


def is_loop_body() -> bool:
    """Returns whether a loop of JAX's (`lax.scan`, `nnx.scan`, while loops) runs this inside a governed call.

    Such a body must return its carry in the dtype it came in. Other transforms must not change dtypes.
    """
    if not _RUNS.stack or _RUNS.stack[-1].trace == _current_trace():
        return False
    entries = 0

    def is_second_entry(frame: types.FrameType) -> bool:
        nonlocal entries
        is_ours = frame.f_globals.get("__package__") == __package__
        entries += is_ours and frame.f_code.co_name == "entry"
        return entries == 2  # The first is of the call that asks, the second of the governed call around it.

    return compat.is_traced_by_loop(is_second_entry)


@contextlib.contextmanager
def opened(module: Any, bare: type, precision: ModulePrecision, class_dtype: Any) -> Iterator[Any]:
    """Gives the proxy of a module for the length of a call.

    Args:
      module: the module.
      bare: its class without a policy.
      precision: by which its own Params are read.
      class_dtype: what a `dtype` that its class defines is read as; None to leave it.
    """
    run, proxy = Run(known=new_params.held(vars(module))), _proxy(module, bare, precision, class_dtype)
    run.proxies.append((proxy, module))
    before = _RUNS.stack
    _RUNS.stack = (*before, run)
    try:
        yield proxy
    finally:
        _RUNS.stack = before
        for container, handed_out, as_it_was in run.containers:
            _bring_back(container, handed_out, as_it_was)
        new_params.store(vars(module), run.known, precision)


def original(value: Any) -> Any:
    """Returns a value with the Variables and nodes themselves in place of views and proxies of them.

    Nodes that were made during the call, and took views or proxies up, are put right in place.
    """
    seen: set[int] = set()

    def one(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            return compat.origin_of(leaf)
        if not isinstance(leaf, nnx.Pytree) or id(leaf) in seen:
            return leaf
        outer = getattr(type(leaf), "_jmp_policy_proxy_of", None)
        if outer is not None:
            for run in _RUNS.stack:
                for proxy, node in run.proxies:
                    if proxy is leaf:
                        return node
            object.__setattr__(leaf, "__class__", outer)  # A copy that the method made of itself.
        seen.add(id(leaf))
        attributes = vars(leaf)
        for name, attribute in list(attributes.items()):
            if type(attribute) not in graph_nodes.PLAIN and not compat.is_bookkeeping(name):
                new = map_changed(one, attribute, graph_nodes.is_node)
                if new is not attribute:
                    attributes[name] = new
        return leaf

    return map_changed(one, value, graph_nodes.is_node)


def _proxy(node: Any, bare: type, precision: ModulePrecision, class_dtype: Any = None) -> Any:
    with CLASSES:
        cls = _proxy_class(bare, type(node), precision, class_dtype)
    proxy = object.__new__(cls)
    object.__setattr__(proxy, "__dict__", vars(node))
    return proxy


@functools.cache
def _proxy_class(bare: Any, outer: type, precision: ModulePrecision, class_dtype: Any) -> type:
    def getattribute(self: Any, name: str) -> Any:
        if name in vars(outer) and compat.is_capturing(method := vars(outer)[name]):
            return method.__get__(self)
        value = bare.__getattribute__(self, name)
        if type(value) in graph_nodes.PLAIN:
            return stand_in(value, precision.compute_dtype) if name in _PRODUCTS else value
        if name == "__dict__":
            uncast.note_attributes()
        if name.startswith("__") or compat.is_bookkeeping(name):
            return value
        if name not in object.__getattribute__(self, "__dict__"):
            return value
        if not layers.is_flax(bare):
            uncast.note_array(name, value)
        return _seen(bare, name, value, precision)

    def setattribute(self: Any, name: str, value: Any) -> None:
        before = dict(vars(self))
        bare.__setattr__(self, name, value)
        _put_right(vars(self), before, precision)

    namespace: dict[str, Any] = {
        "__getattribute__": getattribute,
        "__setattr__": setattribute,
        "_jmp_policy_proxy_of": outer,
    }
    if class_dtype is not None:
        namespace["dtype"] = class_dtype
    return subclass(bare, namespace)


def _put_right(attributes: dict[str, Any], before: dict[str, Any], precision: ModulePrecision) -> None:
    """Stores originals in place of the views and proxies that an assignment has put into a module.

    Afterwards, since Flax unpacks what is assigned (`nnx.data(...)`), and a class may have a `__setattr__` of
    its own that makes something else of it. New Params are stored in param dtype.
    """
    for name, value in list(attributes.items()):
        old = before.get(name)
        if value is old or type(value) in graph_nodes.PLAIN or compat.is_bookkeeping(name):
            continue
        attributes[name] = new = original(value)
        known = _RUNS.stack[-1].known if _RUNS.stack else new_params.held(before)
        if isinstance(old, nnx.Param) and isinstance(new, nnx.Param) and len(graph_nodes.dtypes(old)) == 1:
            graph_nodes.store_in(new, *graph_nodes.dtypes(old))  # As the one whose place it takes.
            known[id(new)] = new
        new_params.store(new, known, precision)


def subclass(bare: Any, namespace: dict[str, Any], metaclass: type | None = None) -> type:
    """Returns a subclass of an NNX class, of the same name, which its author's hooks do not see."""
    finish = compat.register_node_class
    return make_subclass(bare, namespace, root=nnx.Pytree, metaclass=metaclass, finish=finish)


def _seen(bare: type, name: str, value: Any, precision: ModulePrecision) -> Any:
    """Returns an attribute as the methods of a module see it."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            known = _RUNS.stack[-1].views if _RUNS.stack else {}
            return view(leaf, precision, known) if _is_read_cast(bare, name, leaf, precision) else leaf
        if isinstance(leaf, nnx.Pytree) and _is_holder(leaf):
            spec = getattr(type(leaf), "_jmp_policy_specification", None)
            inner = getattr(type(leaf), "_jmp_policy_bare", type(leaf))
            new = _proxy(leaf, inner, precision if spec is None else spec.precision)
            if _RUNS.stack:
                _RUNS.stack[-1].proxies.append((new, leaf))
            return new
        return leaf

    return _shown(value, one)


def _shown(value: Any, one: Callable[[Any], Any]) -> Any:
    """Maps `one` over the nodes in a value; copies of lists and dicts are noted, at every depth."""
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
    """Returns whether a module reads a Variable of its own in another dtype than it is stored in.

    Layers of Flax cast theirs themselves; where gradients are to be float32, the cast must be ours.
    """
    if issubclass(bare, nnx.MultiHeadAttention) and name in ("cached_key", "cached_value"):
        return True
    by_itself = layers.is_flax(bare) and not issubclass(bare, nnx.List | nnx.Dict)
    by_itself = by_itself and (name in layers.OWN_PARAMS or not issubclass(bare, layers.WITH_OWN_PARAMS))
    by_itself = by_itself and not wants_fp32_weight_grads(precision.policy)
    return isinstance(variable, nnx.Param) and not by_itself


def _is_holder(node: nnx.Pytree) -> bool:
    """Returns whether a node is no module that is called, but holds Params for the one that holds it."""
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
