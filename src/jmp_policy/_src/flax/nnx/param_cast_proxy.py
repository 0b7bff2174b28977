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

Classes of proxies and of governed modules are subclasses of the same name, which an object's `__class__` is
set to. A module may ask about its class: `type(self).hook is Base.hook` tells a base class whether somebody
has overridden its hook. `nnx.capture` replaces what a class itself defines, and nothing that it inherits. So
a governed class defines what the class defines, inherits what the class inherits, and its methods, read from
the class, are those of the author.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.core
from flax import nnx

from jmp_policy._src.core.classes import make_subclass
from jmp_policy._src.core.dtypes import called_in_float32, map_changed
from jmp_policy._src.flax import compat
from jmp_policy._src.flax.nnx import graph_nodes, layers
from jmp_policy._src.flax.nnx.param_view import CLASSES, Container, bring_back, seen_as, view
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.named import wants_fp32_weight_grads
from jmp_policy._src.products.functions import stand_in

#: Attributes in which layers of Flax keep the products that they call.
_PRODUCTS = ("dot_general", "conv_general_dilated")


def _current_trace() -> Any:
    """Something that is equal as long as no transform of JAX begins or ends."""
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
    containers: list[Container] = dataclasses.field(default_factory=list)
    known: dict[int, Any] = dataclasses.field(default_factory=dict)


class _Runs(threading.local):
    stack: tuple[Run, ...] = ()


_RUNS = _Runs()


def is_running() -> bool:
    """Whether a governed call is running."""
    return bool(_RUNS.stack)


def is_loop_body() -> bool:
    """Whether a loop of JAX's (`lax.scan`, `nnx.scan`, while loops) runs this inside a governed call.

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
def opened(module: Any, precision: ModulePrecision) -> Iterator[Any]:
    """Gives the proxy of a module for the length of a call.

    Args:
      module: the module.
      precision: by which its own Params are read.
    """
    run, proxy = Run(known=_held(vars(module))), _proxy(module, precision)
    run.proxies.append((proxy, module))
    before = _RUNS.stack
    _RUNS.stack = (*before, run)
    try:
        yield proxy
    finally:
        _RUNS.stack = before
        if run.containers:
            bring_back(run.containers, original)
        _store_new(vars(module), run.known, precision)


def original(value: Any) -> Any:
    """A value with the Variables and nodes themselves in place of views and proxies of them.

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


def _proxy(node: Any, precision: ModulePrecision) -> Any:
    with CLASSES:
        cls = _proxy_class(type(node), precision)
    proxy = object.__new__(cls)
    object.__setattr__(proxy, "__dict__", vars(node))
    return proxy


@functools.cache
def _proxy_class(outer: type, precision: ModulePrecision) -> type:
    bare: Any = graph_nodes.bare_class(outer)

    def getattribute(self: Any, name: str) -> Any:
        if name in vars(outer) and compat.is_capturing(method := vars(outer)[name]):
            return method.__get__(self)
        value = bare.__getattribute__(self, name)
        if type(value) in graph_nodes.PLAIN:
            if name == "perturb":
                return _perturb(value)
            return stand_in(value, precision.compute_dtype) if name in _PRODUCTS else value
        if name.startswith("__") or compat.is_bookkeeping(name):
            return value
        if name not in object.__getattribute__(self, "__dict__"):
            return value
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
    if bare is not outer and "dtype" in vars(outer):
        namespace["dtype"] = vars(outer)["dtype"]
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
        known = _RUNS.stack[-1].known if _RUNS.stack else _held(before)
        if isinstance(old, nnx.Param) and isinstance(new, nnx.Param) and len(graph_nodes.dtypes(old)) == 1:
            graph_nodes.store_in(new, *graph_nodes.dtypes(old))  # As the one whose place it takes.
            known[id(new)] = new
        _store_new(new, known, precision)


def _store_new(attributes: Any, known: dict[int, Any], precision: ModulePrecision) -> None:
    """Stores Params that were made during a call in param dtype, those of new modules too.

    A layer that makes its parameters on the first call takes their dtype from its input, or from parameters
    that it reads: compute dtype in both cases. Only Params are cast. Losses, counters, statistics and caches
    in other Variables stay as their module made them.

    Args:
      attributes: a pytree of nodes and anything else, such as the attributes of a module.
      known: what was there before, as `_held` gives it; what is new is added to it.
      precision: of the module that holds the Params.
    """
    for key, value in _held(attributes).items():
        if key in known:
            continue
        known[key] = value
        if isinstance(value, nnx.Param):
            graph_nodes.store_in(value, precision.param_dtype)
        elif graph_nodes.specification(value) is None:
            island = ModulePrecision(precision.policy, layers.is_island(value))
            _store_new(vars(value), known, island)


def _held(attributes: Any) -> dict[int, Any]:
    """The Params and modules in a pytree by identity, in objects and NNX's containers too.

    Of what those modules hold, nothing.
    """
    if isinstance(attributes, dict):
        attributes = [value for value in attributes.values() if type(value) not in graph_nodes.PLAIN]
    found: dict[int, Any] = {}
    for leaf in jax.tree.leaves(attributes, is_leaf=graph_nodes.is_node):
        if isinstance(leaf, nnx.Param) or graph_nodes.is_called(leaf):
            found[id(leaf)] = leaf
        elif isinstance(leaf, nnx.Pytree):
            found |= _held(vars(leaf))
    return found


def _seen(bare: type, name: str, value: Any, precision: ModulePrecision) -> Any:
    """An attribute as the methods of a module see it."""
    if graph_nodes.is_called(value):
        return value
    run = _RUNS.stack[-1] if _RUNS.stack else Run()

    def one(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            return view(leaf, precision, run.views) if _is_read_cast(bare, name, leaf, precision) else leaf
        if not _is_holder(leaf):
            return leaf
        spec = graph_nodes.specification(leaf)
        new = _proxy(leaf, precision if spec is None else spec.precision)
        run.proxies.append((new, leaf))
        return new

    if isinstance(value, list | dict | tuple):
        return seen_as(value, one, run.containers)
    return map_changed(one, value, graph_nodes.is_node)


def _is_read_cast(bare: type, name: str, variable: nnx.Variable, precision: ModulePrecision) -> bool:
    """Whether a module reads a Variable of its own in another dtype than it is stored in.

    Layers of Flax cast theirs themselves; where gradients are to be float32, the cast must be ours.
    """
    if issubclass(bare, nnx.MultiHeadAttention) and name in ("cached_key", "cached_value"):
        return True
    by_itself = layers.is_flax(bare) and not issubclass(bare, nnx.List | nnx.Dict)
    by_itself = by_itself and (name in layers.OWN_PARAMS or not issubclass(bare, layers.WITH_OWN_PARAMS))
    by_itself = by_itself and not wants_fp32_weight_grads(precision.policy)
    return isinstance(variable, nnx.Param) and not by_itself


def _is_holder(node: Any) -> bool:
    """Whether a node is no module that is called, but holds Params for the one that holds it."""
    if graph_nodes.is_called(node) or not isinstance(node, nnx.Pytree):
        return False
    return any(
        bool(graph_nodes.dtypes(value)) if isinstance(value, nnx.Param) else _is_holder(value)
        for _, value in graph_nodes.children(node)
        if isinstance(value, nnx.Param | nnx.Pytree)
    )


def _perturb(perturb: Any) -> Any:
    """Stands in for `nnx.Module.perturb`: the Variable is float32, as in the bare model; values stay half."""
    if getattr(perturb, "__func__", None) is not nnx.Module.perturb:
        return perturb

    @functools.wraps(perturb)
    def in_float32(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return called_in_float32(lambda wide: perturb(name, wide, *args, **kwargs), value)

    return in_float32


class Method:
    """A method of a stand-in: that of the bare class, whatever that is when it is asked for.

    Args:
      bare: the class.
      name: of the method.
      instead: the function that is bound to a module in its place; None for the author's.
    """

    def __init__(self, bare: type, name: str, instead: Callable[..., Any] | None = None):
        self._bare, self._name, self._instead = bare, name, instead
        functools.update_wrapper(self, inspect.getattr_static(bare, name), updated=())

    def __get__(self, module: Any, cls: type | None = None) -> Any:
        if module is not None and self._instead is not None:
            return types.MethodType(self._instead, module)
        return bound(inspect.getattr_static(self._bare, self._name), module, cls)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__get__(module, type(module))(*args, **kwargs)


def bound(method: Any, module: Any, cls: type | None = None) -> Any:
    """A method as it is read from a module, or, where that is None, from a class."""
    return method.__get__(module, cls or type(module)) if hasattr(method, "__get__") else method


def subclass(bare: Any, namespace: dict[str, Any], metaclass: type | None = None) -> type:
    """A subclass of an NNX class, of the same name, which its author's hooks do not see."""
    finish = compat.register_node_class
    return make_subclass(bare, namespace, root=nnx.Pytree, metaclass=metaclass, finish=finish)


def stand_in_class(
    bare: type, methods: Mapping[str, Any], namespace: dict[str, Any], metaclass: type | None = None
) -> type:
    """A stand-in for a class.

    Args:
      bare: the class.
      methods: what runs in place of methods that it has.
      namespace: other attributes of the new class.
      metaclass: a subclass of the class's metaclass; left out, that one itself.
    """
    own = [name for name, value in vars(bare).items() if _is_public_method(name, value)]
    inherited = {name: method for name, method in methods.items() if name not in own}
    base = subclass(bare, inherited) if inherited else bare
    defined = {name: methods.get(name) or Method(bare, name) for name in own}
    return subclass(base, {**namespace, **defined}, metaclass)


def _is_public_method(name: str, value: Any) -> bool:
    is_public = name == "__call__" or not name.startswith("_")
    return is_public and callable(value) and not isinstance(value, type | staticmethod)
