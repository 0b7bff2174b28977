"""A parameter as the methods of a governed module see it: a Variable that reads in another dtype.

A view is a Variable that has no storage. It stores in the Variable that it is a view of, its origin, and
casts what is read:

    w = nnx.Param(jnp.ones(2))               # float32
    v = view(w, precision, {})               # precision asks for float16
    v[...].dtype                             # float16: w's value, cast here and now
    v[...] = v[...] * 2                      # stored in w in float32, with a warning: the product was rounded
    v.get_raw_value() is w.get_raw_value()   # what an optimizer, nnx.split and a checkpoint see is w's

Its class is a subclass of the Variable's own (`compat.view_class`), so that `isinstance(v, nnx.Param)` holds,
and filters, metadata and methods of a user's Variable work.

An object that holds Params for a module comes out as a proxy, `nnx.List` and `nnx.Dict` too. Plain lists and
dicts with such things in them come out as copies: a method that changes one must assign it to the attribute.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jmp_policy._src.core.dtypes import cast_floating, is_half, map_changed
from jmp_policy._src.flax import compat
from jmp_policy._src.flax.nnx import graph_nodes, layers, stored_arrays
from jmp_policy._src.flax.nnx.governed_calls import CLASSES, RUNS, Run, held, original, store_new
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.rules import wants_fp32_weight_grads
from jmp_policy._src.weight_grads.param_casts import cast_weight


def seen(bare: type, name: str, value: Any, precision: ModulePrecision, proxied: Callable[..., Any]) -> Any:
    """An attribute of a module as its methods see it.

    Args:
      bare: class of the module.
      name, value: of the attribute.
      precision: by which the module's own Params are read.
      proxied: makes a proxy: `(node, precision, run)`.
    """
    run = RUNS.stack[-1] if RUNS.stack else Run()

    def one(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            return view(leaf, precision, run.views) if _is_read_cast(bare, name, leaf, precision) else leaf
        if not _is_holder(leaf):
            return leaf
        spec = graph_nodes.specification(leaf)
        return proxied(leaf, precision if spec is None else spec.precision, run)

    return map_changed(one, value, graph_nodes.is_node)


def _is_read_cast(bare: type, name: str, variable: nnx.Variable, precision: ModulePrecision) -> bool:
    """Whether a module reads a Variable of its own in another dtype than it is stored in.

    Layers of Flax cast theirs themselves; where gradients are to be float32, the cast must be ours.
    """
    if issubclass(bare, nnx.MultiHeadAttention) and name in ("cached_key", "cached_value"):
        return True
    if not isinstance(variable, nnx.Param):
        return False
    casts_others = not layers.is_flax(bare) or issubclass(bare, (nnx.List, nnx.Dict, *layers.WITH_OWN_PARAMS))
    return casts_others or wants_fp32_weight_grads(precision.policy)


def _is_holder(node: Any) -> bool:
    """Whether a node is no module that is called, but holds Params for the one that holds it."""
    if graph_nodes.is_called(node) or not isinstance(node, nnx.Pytree):
        return False
    return any(
        bool(graph_nodes.dtypes(value)) if isinstance(value, nnx.Param) else _is_holder(value)
        for _, value in graph_nodes.children(node)
        if isinstance(value, nnx.Param | nnx.Pytree)
    )


def put_right(attributes: dict[str, Any], before: dict[str, Any], precision: ModulePrecision) -> None:
    """Stores originals in place of the views and proxies that an assignment has put into a module.

    Afterwards, since Flax unpacks what is assigned (`nnx.data(...)`), and a class may have a `__setattr__` of
    its own that makes something else of it. New Params are stored in param dtype.
    """
    for name, value in list(attributes.items()):
        old = before.get(name)
        if value is old or type(value) in graph_nodes.PLAIN or compat.is_bookkeeping(name):
            continue
        attributes[name] = new = original(value)
        known = RUNS.stack[-1].known if RUNS.stack else held(before)
        if isinstance(old, nnx.Param) and isinstance(new, nnx.Param) and len(graph_nodes.dtypes(old)) == 1:
            stored_arrays.store_in(new, *graph_nodes.dtypes(old))  # As the one whose place it takes.
            known[id(new)] = new
        store_new(new, known, precision)


def view(variable: nnx.Variable, precision: ModulePrecision, known: dict[Any, Any]) -> nnx.Variable:
    """A Variable that is `variable`, but for reading in another dtype.

    Args:
      variable: the Variable, or a view of it.
      precision: by which it is read. Stored in that dtype already, the Variable itself comes back.
      known: the views that were handed out before; the same one is handed out again.
    """
    variable = compat.origin_of(variable)  # Of two precisions the inner one decides.
    if graph_nodes.dtypes(variable) <= {precision.used_param_dtype}:
        return variable
    key = (id(variable), precision)
    if key not in known:
        with CLASSES:
            cls = _view_class(variable.var_type, precision)
        known[key] = compat.view_of(variable, cls)
    return known[key]


@functools.cache
def _view_class(base: Any, precision: ModulePrecision) -> Any:
    """The class of views of `base`, one per precision, so that caches of jit hit."""
    return compat.view_class(base, {**_reading(base, precision), **_writing(base), **_identity(base)})


def _reading(base: Any, precision: ModulePrecision) -> dict[str, Any]:
    """How views read: the value is cast, and so are its attributes (`w.dtype`, `w.T`)."""

    def get_value(self: Any, **kwargs: Any) -> Any:
        return cast_weight(base.get_value(self, **kwargs), precision.used_param_dtype, precision.policy)

    def getattribute_of_value(self: Any, name: str) -> Any:
        if name.startswith("_") or self.has_metadata(name):
            return base.__getattr__(self, name)
        return getattr(self.get_value(), name)

    return {"get_value": get_value, "__getattr__": getattribute_of_value}


def _writing(base: Any) -> dict[str, Any]:
    """How views write: what was computed in half is stored in the dtype that the origin has."""

    def set_value(self: Any, value: Any, **kwargs: Any) -> None:
        _warn_if_rounded(compat.origin_of(self), value)
        stored = graph_nodes.dtypes(self)
        base.set_value(self, cast_floating(value, *stored) if len(stored) == 1 else value, **kwargs)

    def copy_from(self: Any, other: Any) -> None:
        compat.origin_of(self).copy_from(compat.origin_of(other))

    return {"set_value": set_value, "copy_from": copy_from}


def _identity(base: Any) -> dict[str, Any]:
    """What views say they are: Variables of the origin's type; a copy is one of the origin."""
    return {
        "var_type": property(lambda self: base),
        "type": property(lambda self: base),
        "__copy__": lambda self: compat.origin_of(self).copy(),
    }


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
