"""Modules that need more than settings: a subclass whose calls cast parameters, inputs and results.

One subclass per class and specification, of the same name. Its methods run the bare class's method on the
module's proxy (see `param_cast_proxy`), in which its own Params read in compute dtype.
"""

import collections
import contextlib
import copyreg
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import flax.nnx as nnx
import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_dtype_or_none, is_half
from jmp_policy._src.flax import compat, float32_products
from jmp_policy._src.flax.nnx import graph_nodes, layers, param_cast_proxy
from jmp_policy._src.flax.nnx.graph_nodes import governed_methods
from jmp_policy._src.policy.half_errors import explained
from jmp_policy._src.policy.module_precision import (
    ModulePrecision,
    SmallInputs,
    cast_inputs,
    cast_outputs,
    small_inputs,
)
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import path_text
from jmp_policy._src.weight_grads import transform

#: What to do about an array that is used as it is stored.
_REPAIR = (
    "Make it an nnx.Param that a method of its own module reads from self, or cast it (.astype(x.dtype)); "
    "what was put into the model after wrap is governed when the model is wrapped again."
)


@dataclasses.dataclass(frozen=True)
class Specification:
    """How a module is governed.

    Args:
      precision: its policy, and whether it is a float32 island.
      policy_changes: whether the code around it is under another policy, so that the output dtype applies.
      methods: the methods that are governed, as far as the class has them.
    """

    precision: ModulePrecision
    policy_changes: bool
    methods: tuple[str, ...]


def specification(module: Any) -> Specification | None:
    """How a module is governed; None for one that is not, or by settings alone."""
    return getattr(type(module), "_jmp_policy_specification", None)


def policy_of(module: nnx.Module) -> Policy | None:
    """The policy that a wrapped module computes under.

    None for bare modules, and for layers of Flax that follow their policy by settings alone: they are what
    somebody could have written by hand.

    Example:
      >>> from flax import nnx
      >>> from jmp_policy.nnx import wrap
      >>> model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
      >>> policy_of(wrap(model, "mixed_float16")), policy_of(model)
      (Policy('params=float32,compute=float16,output=float32'), None)
    """
    spec = specification(module)
    return None if spec is None else spec.precision.policy


def governed_class(bare: type, spec: Specification) -> type:
    """The subclass that stands in for `bare`; the same for equal specifications, so that caches hit."""
    with param_cast_proxy.CLASSES:
        return _made_governed_class(bare, spec)


@functools.cache
def _made_governed_class(bare: type, spec: Specification) -> type:
    namespace: dict[str, Any] = {
        "__reduce__": _reduce,
        "_jmp_policy_specification": spec,
        "_jmp_policy_bare": bare,
    }
    methods = {name: _entry(bare, name) for name in governed_methods(bare, spec.methods)}
    if issubclass(bare, nnx.MultiHeadAttention):
        methods["init_cache"] = _init_cache(bare, spec)
    class_dtype = inspect.getattr_static(bare, "dtype", None)
    if class_dtype is not None and not isinstance(class_dtype, property) and is_dtype_or_none(class_dtype):
        namespace["dtype"] = layers.scalar_type(spec.precision.compute_dtype)
    # `nnx.capture` replaces the methods that a class defines itself, and not those that it inherits: the new
    # class must define what `bare` does, and inherit what `bare` inherits.
    own = {name for name, value in vars(bare).items() if _is_public_method(name, value)}
    inherited = {name: method for name, method in methods.items() if name not in own}
    base = param_cast_proxy.subclass(bare, inherited) if inherited else bare
    namespace |= {name: methods.get(name) or _forward(bare, name) for name in own}
    return param_cast_proxy.subclass(base, namespace, metaclass=_metaclass(type(bare)))


def _is_public_method(name: str, value: Any) -> bool:
    is_public = name == "__call__" or not name.startswith("_")
    return is_public and callable(value) and not isinstance(value, type | staticmethod)


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
    return object.__new__, (type(self),), self.__getstate__()


def _entry(bare: type, name: str) -> Callable[..., Any]:
    method: Any = inspect.getattr_static(bare, name)

    @functools.wraps(getattr(bare, name), updated=())
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        if specification(self) is None:  # Called by a method that runs on the proxy, under `nnx.capture`.
            return _bound(method, self)(*args, **kwargs)
        return _run(bare, method, self, args, kwargs)

    return entry


def _forward(bare: type, name: str) -> Callable[..., Any]:
    """A method that runs the one of the bare class, whatever that is when it is called."""

    @functools.wraps(inspect.getattr_static(bare, name), updated=())
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _bound(inspect.getattr_static(bare, name), self)(*args, **kwargs)

    return forward


def _bound(method: Any, module: Any) -> Callable[..., Any]:
    return method.__get__(module, type(module)) if hasattr(method, "__get__") else method


def _init_cache(bare: Any, spec: Specification) -> Callable[..., Any]:
    compute = layers.scalar_type(spec.precision.compute_dtype)

    @functools.wraps(bare.init_cache)
    def init_cache(self: Any, input_shape: Any, dtype: Any = compute) -> None:
        bare.init_cache(self, input_shape, dtype)

    return init_cache


def _run(bare: type, method: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a method of the bare class under the module's specification."""
    spec = specification(module)
    assert spec is not None
    precision = spec.precision
    if transform.starts(precision.policy):
        from jmp_policy._src.flax.nnx.states import transformed

        run = transformed(functools.partial(_run, bare, method), transform.with_float32_gradients)
        return run(module, args, kwargs)
    in_loop = param_cast_proxy.is_loop_body()
    small = small_inputs((args, kwargs), graph_nodes.is_node)
    with (
        small.inside(),
        explained(bare.__name__, bare.__name__, precision),
        _watched(module),
        param_cast_proxy.opened(module, precision) as proxy,
    ):
        new_args, new_kwargs = _cast_inputs(module, precision, args, kwargs, small)
        out = param_cast_proxy.original(_bound(method, proxy)(*new_args, **new_kwargs))
    return cast_outputs(
        out,
        args,
        precision.policy,
        policy_changes=spec.policy_changes,
        may_be_scanned=in_loop or isinstance(module, nnx.RNNCellBase),
        may_return_carry_only=in_loop,
        kept_rank=small.output_rank(precision),
        is_leaf=graph_nodes.is_node,
    )


def _watched(module: Any) -> contextlib.AbstractContextManager[None]:
    if param_cast_proxy.is_running():
        return contextlib.nullcontext()
    return float32_products.watched(module, functools.partial(_stored, module), _REPAIR)


def _stored(root: nnx.Module) -> Iterator[tuple[str, Any]]:
    """The arrays in a model that belong to modules in half precision, with their paths.

    Modules of bound methods come last: they may be copies without a policy of what was met before.
    """
    waiting: collections.deque[tuple[graph_nodes.Path, Any, bool]] = collections.deque([((), root, True)])
    methods: collections.deque[tuple[graph_nodes.Path, Any, bool]] = collections.deque()
    seen: set[int] = set()
    while waiting or methods:
        path, value, half = (waiting or methods).popleft()
        if graph_nodes.is_node(value):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, nnx.Variable):
            value = value.get_raw_value()
        elif isinstance(value, nnx.Pytree):
            half = _computes_in_half(value, half)
            value = {name: x for name, x in vars(value).items() if not compat.is_bookkeeping(name)}
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=graph_nodes.is_node):
            here = (*path, *map(graph_nodes.key_of, keys))
            if isinstance(leaf, jax.Array | np.ndarray):
                if half:
                    yield path_text(here), leaf
            elif graph_nodes.is_node(leaf):
                waiting.append((here, leaf, half))
            elif isinstance(leaf, functools.partial):
                methods.append((here, [leaf.func, leaf.args, leaf.keywords], half))
            elif isinstance(leaf, types.MethodType):
                methods.append((here, leaf.__self__, half))


def _computes_in_half(node: Any, above: bool) -> bool:
    """Whether a node uses its arrays in half precision; if it does not say, as the one that holds it."""
    if layers.is_island(node) or layers.linen_modules(node):
        return False  # A Linen module looks at its variables itself.
    spec = specification(node)
    if spec is not None:
        return is_half(spec.precision.used_param_dtype)
    dtype = vars(node).get("dtype")
    return above if dtype is None or not is_dtype_or_none(dtype) else is_half(dtype)


def _cast_inputs(
    module: Any, precision: ModulePrecision, args: Any, kwargs: Any, small: SmallInputs
) -> tuple[Any, Any]:
    if precision.island:
        # What arrives in float32 (an image, positions) is taken as such: half would lose its range.
        return args, kwargs
    kept_args, kept_kwargs = 0, ()
    if layers.keeps_carry(module):
        kept_args, kept_kwargs = 1, ("carry",)
    elif isinstance(module, nnx.RNN | nnx.Bidirectional):
        kept_kwargs = ("initial_carry",)

    def cast(tree: Any) -> Any:
        return cast_inputs(tree, precision, small, graph_nodes.is_node)

    new_args = (*args[:kept_args], *(cast(x) for x in args[kept_args:]))
    return new_args, {name: x if name in kept_kwargs else cast(x) for name, x in kwargs.items()}
