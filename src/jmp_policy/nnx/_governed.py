"""Modules that need more than settings: a subclass whose calls cast parameters, inputs and results.

One subclass per class and specification, of the same name. Its methods run the bare class's method on a copy
of the instance in which every Param reads as its cast; so whatever the method does with them (`self.w[...]`,
`self.w @ x`, `nnx.remat` of a method) sees compute dtype, casts happen where a value is read, and the
Variables themselves are never touched. Attributes that the method sets come back to the instance.
"""

import contextlib
import copyreg
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flax import nnx

from jmp_policy._border import cast_results
from jmp_policy._cast import cast_floating, cast_leaf, map_changed
from jmp_policy._policy import Policy
from jmp_policy._treatment import Treatment
from jmp_policy.nnx import _graph, _layers


@dataclasses.dataclass(frozen=True)
class Specification:
    """How a module is governed.

    Args:
      treatment: its policy, and whether it is a float32 island.
      at_border: whether the code around it is under another policy, so that the output dtype applies.
      methods: the methods that are governed, as far as the class has them.
    """

    treatment: Treatment
    at_border: bool
    methods: tuple[str, ...]


def specification(module: Any) -> Specification | None:
    """How a module is governed; None for one that is not, or by settings alone."""
    return getattr(type(module), "_jmp_policy_specification", None)


def policy_of(module: nnx.Module) -> Policy | None:
    """The policy that a wrapped module computes under.

    None for bare modules, and for layers of Flax inside a wrapped module that follow it by their own
    `dtype` setting.
    """
    spec = specification(module)
    return None if spec is None else spec.treatment.policy


def bare_class(cls: type) -> type:
    """The class that a governed one was made from; any other class itself."""
    return getattr(cls, "_jmp_policy_bare", cls)


def governed_methods(bare: type, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the named methods that a class has, `__call__` among them."""
    has_attend = ("attend",) if issubclass(bare, nnx.Embed) else ()
    return tuple(m for m in ("__call__", *has_attend, *methods) if m in own_methods(bare))


def own_methods(cls: type) -> set[str]:
    """Names of the methods that a module's class and its bases below `nnx.Module` define."""
    own = [c for c in cls.__mro__ if issubclass(c, nnx.Module) and c is not nnx.Module]
    return {name for c in own for name, value in vars(c).items() if callable(value)}


@functools.cache
def governed_class(bare: type, spec: Specification) -> type:
    """The subclass that stands in for `bare`; the same one for equal specifications, so that caches hit."""
    namespace: dict[str, Any] = {
        "__module__": bare.__module__,
        "__qualname__": bare.__qualname__,
        "__doc__": bare.__doc__,
        "__reduce__": _reduce,
        "_jmp_policy_specification": spec,
        "_jmp_policy_bare": bare,
    }
    for name in governed_methods(bare, spec.methods):
        namespace[name] = _entry(bare, name)
    if issubclass(bare, nnx.MultiHeadAttention):
        namespace["init_cache"] = _init_cache(bare, spec)
    keywords: dict[str, Any] = {"metaclass": _metaclass(type(bare))}
    if not bare._pytree__is_pytree and not issubclass(bare, nnx.Object):  # type: ignore[attr-defined]
        keywords["pytree"] = False
    try:
        return types.new_class(bare.__name__, (bare,), keywords, lambda ns: ns.update(namespace))
    except Exception as error:
        raise TypeError(
            f"wrap makes a subclass of {bare.__qualname__}, which that class does not allow ({error}). Let "
            "the class be subclassed, or keep the module out of the wrapped model."
        ) from error


@functools.cache
def _metaclass(base: type) -> type:
    """A metaclass whose classes can be pickled, as graph definitions that name them are."""
    meta = type(base.__name__, (base,), {})
    copyreg.pickle(meta, _reduce_class)  # type: ignore[arg-type]
    return meta


def _reduce_class(cls: Any) -> Any:
    if "_jmp_policy_bare" not in vars(cls):
        return cls.__qualname__  # A class that somebody derived from a governed one.
    return governed_class, (cls._jmp_policy_bare, cls._jmp_policy_specification)


def _reduce(self: Any) -> Any:
    return _empty, (type(self),), self.__getstate__()


def _empty(cls: type) -> Any:
    return object.__new__(cls)


def _entry(bare: type, name: str) -> Callable[..., Any]:
    method: Any = getattr(bare, name)

    @functools.wraps(method, updated=())
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, name, args, kwargs)

    return entry


def _init_cache(bare: Any, spec: Specification) -> Callable[..., Any]:
    compute = _layers.scalar_type(spec.treatment.compute_dtype)

    @functools.wraps(bare.init_cache)
    def init_cache(self: Any, input_shape: Any, dtype: Any = compute) -> None:
        bare.init_cache(self, input_shape, dtype)

    return init_cache


def _run(module: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a method of the bare class under the module's specification."""
    spec = specification(module)
    assert spec is not None
    treatment = spec.treatment
    new_args, new_kwargs = _cast_inputs(module, treatment, args, kwargs)
    with _opened(module, spec) as inner:
        out = getattr(inner, name)(*new_args, **new_kwargs)
        out = map_changed(lambda x: module if x is inner else x, out, _graph.is_node)
    return cast_results(
        out,
        args,
        treatment.policy,
        at_border=spec.at_border,
        may_be_scanned=not spec.at_border or isinstance(module, nnx.RNNCellBase),
        is_leaf=_graph.is_node,
    )


def _cast_inputs(module: Any, treatment: Treatment, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if treatment.island:
        # What arrives in float32 (an image, positions) is taken as such: half would lose its range.
        return args, kwargs
    kept_args, kept_kwargs = 0, ()
    if _layers.keeps_carry(module):
        kept_args, kept_kwargs = 1, ("carry",)
    elif isinstance(module, nnx.RNN | nnx.Bidirectional):
        kept_kwargs = ("initial_carry",)

    def cast(tree: Any) -> Any:
        return map_changed(lambda x: cast_leaf(x, treatment.compute_dtype), tree, _graph.is_node)

    new_args = (*args[:kept_args], *(cast(x) for x in args[kept_args:]))
    return new_args, {name: x if name in kept_kwargs else cast(x) for name, x in kwargs.items()}


@contextlib.contextmanager
def _opened(module: Any, spec: Specification) -> Iterator[Any]:
    """A copy of the module, of its bare class, whose Params read in the dtype of use."""
    copies = _Copies(spec.treatment.used_param_dtype)
    inner = copies.of_node(module, bare_class(type(module)))
    try:
        yield inner
    finally:
        copies.close()


def _is_read_cast(node: Any, name: str, variable: nnx.Variable) -> bool:
    """Whether a node reads a Variable of its own in another dtype than it is stored in."""
    if isinstance(node, nnx.MultiHeadAttention) and name in ("cached_key", "cached_value"):
        return True
    by_itself = _layers.is_flax(bare_class(type(node))) and not isinstance(node, nnx.List | nnx.Dict)
    return isinstance(variable, nnx.Param) and not by_itself


class _Copies:
    """Copies of nodes for the length of one call, and what has to be brought back from them."""

    def __init__(self, dtype: np.dtype):
        self._dtype = dtype
        self._nodes: list[tuple[Any, Any, dict[str, Any]]] = []
        self._variables: dict[int, tuple[nnx.Variable, nnx.Variable, Any]] = {}

    def of_node(self, node: Any, cls: type) -> Any:
        """A copy of a node that shares everything with it except the Params it holds itself."""
        spec = specification(node)
        dtype = self._dtype if spec is None else spec.treatment.used_param_dtype
        attributes = {name: self._of_attribute(node, name, x, dtype) for name, x in vars(node).items()}
        new = object.__new__(cls)
        vars(new).update(attributes)
        self._nodes.append((node, new, attributes))
        return new

    def _of_attribute(self, node: Any, name: str, value: Any, dtype: np.dtype) -> Any:
        return map_changed(lambda x: self._of_value(node, name, x, dtype), value, _graph.is_node)

    def _of_value(self, node: Any, name: str, value: Any, dtype: np.dtype) -> Any:
        if isinstance(value, nnx.Variable):
            return self._of_variable(value, dtype) if _is_read_cast(node, name, value) else value
        is_holder = isinstance(value, nnx.List | nnx.Dict) or (
            isinstance(value, nnx.Pytree) and not isinstance(value, nnx.Module)
        )
        if is_holder and next(_graph.own_params(value), None) is not None:
            return self.of_node(value, type(value))
        return value

    def _of_variable(self, variable: nnx.Variable, dtype: np.dtype) -> nnx.Variable:
        if _graph.dtypes(variable) <= {dtype}:
            return variable
        if id(variable) not in self._variables:
            raw = variable.get_raw_value()
            metadata = {**variable.get_metadata(), "hijax": False}
            copy = _reading_class(variable.var_type, dtype).from_metadata(raw, metadata)
            self._variables[id(variable)] = (variable, copy, raw)
        return self._variables[id(variable)][1]

    def close(self) -> None:
        """Brings back what was assigned: attributes of nodes, values of Variables."""
        originals = {id(copy): variable for variable, copy, _ in self._variables.values()}
        originals |= {id(new): node for node, new, _ in self._nodes}
        for variable, copy, raw in self._variables.values():
            written = copy.get_raw_value()
            if written is not raw:
                stored = next(iter(_graph.dtypes(variable)))
                _graph.write(variable, cast_floating(written, stored))
        for node, new, before in self._nodes:
            after = vars(new)
            for name in before.keys() - after.keys():
                vars(node).pop(name, None)
            for name, value in after.items():
                if name not in before or value is not before[name]:
                    vars(node)[name] = originals.get(id(value), value)


@functools.cache
def _reading_class(cls: type[nnx.Variable], dtype: np.dtype) -> type[nnx.Variable]:
    """A Variable class that stores as `cls` does and reads in `dtype`.

    A class, and not a cast value, so that a cast happens where the value is read: inside `nnx.remat`, what
    is saved is the parameter and not a second copy of it.
    """
    base: Any = cls

    def get_value(self: Any, **kwargs: Any) -> Any:
        return cast_floating(base.get_value(self, **kwargs), dtype)

    def getattribute_of_value(self: Any, name: str) -> Any:
        if name.startswith("_") or name in self._var_metadata:
            return base.__getattr__(self, name)
        return getattr(self.get_value(), name)

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "get_value": get_value,
        "__getattr__": getattribute_of_value,
    }
    return types.new_class(cls.__name__, (cls,), {}, lambda ns: ns.update(namespace))
