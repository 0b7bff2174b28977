"""The governed calls that are running: what each has handed out of its module, and what was stored in it."""

import dataclasses
import threading
import types
from collections.abc import Iterable
from typing import Any

import jax
import jax.extend.core
import numpy as np
from flax import nnx

from jmp_policy._src.core.classes import make_subclass
from jmp_policy._src.core.dtypes import map_changed
from jmp_policy._src.flax import compat
from jmp_policy._src.flax.nnx import graph_nodes, layers, stored_arrays
from jmp_policy._src.policy.module_precision import ModulePrecision

#: Held while classes are made: two threads that make one at a time would get two.
CLASSES = threading.RLock()


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
      known: the Variables and modules that the module held before, and those stored since.
    """

    trace: Any = dataclasses.field(default_factory=_current_trace)
    proxies: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    views: dict[Any, Any] = dataclasses.field(default_factory=dict)
    known: dict[int, Any] = dataclasses.field(default_factory=dict)


class _Runs(threading.local):
    stack: tuple[Run, ...] = ()


#: The governed calls that are running in this thread.
RUNS = _Runs()


def is_loop_body() -> bool:
    """Whether a loop of JAX's (`lax.scan`, `nnx.scan`, while loops) runs this inside a governed call.

    Such a body must return its carry in the dtype it came in. Other transforms must not change dtypes.
    """
    if not RUNS.stack or RUNS.stack[-1].trace == _current_trace():
        return False
    entries = 0

    def is_second_entry(frame: types.FrameType) -> bool:
        nonlocal entries
        is_ours = frame.f_globals.get("__package__") == __package__
        entries += is_ours and frame.f_code.co_name == "entry"
        return entries == 2  # The first is of the call that asks, the second of the governed call around it.

    return compat.is_traced_by_loop(is_second_entry)


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
        if hasattr(type(leaf), "_jmp_policy_proxy_of"):
            nodes = (node for run in RUNS.stack for proxy, node in run.proxies if proxy is leaf)
            if (node := next(nodes, None)) is not None:
                return node
            # A copy that the method made of itself.
            object.__setattr__(leaf, "__class__", type(leaf)._jmp_policy_proxy_of)  # type: ignore[attr-defined]
        seen.add(id(leaf))
        attributes = vars(leaf)
        for name, attribute in list(attributes.items()):
            if type(attribute) not in graph_nodes.PLAIN and not compat.is_bookkeeping(name):
                new = map_changed(one, attribute, graph_nodes.is_node)
                if new is not attribute:
                    attributes[name] = new
        return leaf

    return map_changed(one, value, graph_nodes.is_node)


def store_new(attributes: Any, known: dict[int, Any], precision: ModulePrecision) -> None:
    """Stores Params that were made during a call in param dtype, those of new modules too.

    A layer that makes its parameters on the first call takes their dtype from its input, or from parameters
    that it reads: compute dtype in both cases. Only Params are cast. Losses, counters, statistics and caches
    in other Variables stay as their module made them.

    Args:
      attributes: a pytree of nodes and anything else, such as the attributes of a module.
      known: what was there before, as `held` gives it; what is new is added to it.
      precision: of the module that holds the Params.
    """
    for key, value in held(attributes).items():
        if key in known:
            continue
        known[key] = value
        if isinstance(value, nnx.Param):
            stored_arrays.store_in(value, precision.param_dtype)
        elif not isinstance(value, nnx.Variable) and graph_nodes.specification(value) is None:
            island = ModulePrecision(precision.policy, layers.is_island(value))
            store_new(vars(value), known, island)


def float32_state(known: Iterable[Any]) -> list[nnx.Variable]:
    """The Variables among what `held` gives whose float32 state stays so where half values are written.

    Else a loop that carries them would fail, and a running mean would stand still. Not Params and caches.
    """
    variables = (value for value in known if isinstance(value, nnx.Variable))
    state = (variable for variable in variables if not isinstance(variable, nnx.Param | nnx.Cache))
    return [variable for variable in state if graph_nodes.dtypes(variable) == {np.dtype(np.float32)}]


def held(attributes: Any) -> dict[int, Any]:
    """The Variables and modules in a pytree by identity, in objects and NNX's containers too.

    Of what those modules hold, nothing.
    """
    if isinstance(attributes, dict):
        attributes = [value for value in attributes.values() if type(value) not in graph_nodes.PLAIN]
    found: dict[int, Any] = {}
    for leaf in jax.tree.leaves(attributes, is_leaf=graph_nodes.is_node):
        if isinstance(leaf, nnx.Variable) or graph_nodes.is_called(leaf):
            found[id(leaf)] = leaf
        elif isinstance(leaf, nnx.Pytree):
            found |= held(vars(leaf))
    return found


def subclass(bare: Any, namespace: dict[str, Any], metaclass: type | None = None) -> type:
    """A subclass of an NNX class, of the same name, which its author's hooks do not see.

    An object's `__class__` is set to it. A module may ask about its class (`type(self).hook is Base.hook`
    tells a base class whether somebody has overridden its hook), so that all else is inherited.
    """
    finish = compat.register_node_class
    return make_subclass(bare, namespace, root=nnx.Pytree, metaclass=metaclass, finish=finish)
