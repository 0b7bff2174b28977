"""Modules that need more than settings: a subclass whose calls cast parameters, inputs and results.

One subclass per class and specification, of the same name. Its methods run the bare class's method on the
module's proxy (see `param_cast_proxy`), in which its own Params read in compute dtype.
"""

import contextlib
import copyreg
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import flax.nnx as nnx
import jax

from jmp_policy._src.core.dtypes import is_dtype_or_none
from jmp_policy._src.flax import float32_products
from jmp_policy._src.flax.nnx import graph_nodes, layers, param_cast_proxy, stored_arrays
from jmp_policy._src.flax.nnx.graph_nodes import governed_methods, specification
from jmp_policy._src.flax.nnx.param_cast_proxy import bound, stand_in_class
from jmp_policy._src.policy import half_errors
from jmp_policy._src.policy.module_precision import (
    ModulePrecision,
    OwnParams,
    cast_inputs,
    cast_outputs,
    small_inputs,
)
from jmp_policy._src.policy.named import wants_fp32_weight_grads
from jmp_policy._src.weight_grads import param_casts, transform


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
    return stand_in_class(bare, methods, namespace, _metaclass(type(bare)))


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
            return bound(method, self)(*args, **kwargs)
        return _run(bare, method, self, args, kwargs)

    return entry


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
    if wants_fp32_weight_grads(precision.policy) and not param_casts.TRACED_FOR_IT.value:
        from jmp_policy._src.flax.nnx.states import transformed

        run = transformed(functools.partial(_run, bare, method), transform.with_float32_gradients)
        return run(module, args, kwargs)
    in_loop = param_cast_proxy.is_loop_body()
    small = small_inputs((args, kwargs), graph_nodes.is_node)
    is_few = precision.island and layers.sums_few(module) and layers.has_few_results(module)
    own = OwnParams.of(_arrays(graph_nodes.own_params(module)))
    if not precision.island and precision.keeps_small_inputs and small.are_all and own.sum_few():
        precision = precision.as_island()
    opened = param_cast_proxy.opened(module, precision)
    try:
        with small.inside(), _watched(module), opened as proxy:
            new_args, new_kwargs = args, kwargs
            # What arrives in float32 (an image, positions) is normalised as such: half would lose its range.
            if not precision.island:
                new_args, new_kwargs = cast_inputs((args, kwargs), precision, small, own, graph_nodes.is_node)
            out = param_cast_proxy.original(bound(method, proxy)(*new_args, **new_kwargs))
    except half_errors.KINDS as error:
        half_errors.explain(error, bare.__name__, bare.__name__, precision)
        raise
    has_params = any(isinstance(variable, nnx.Param) for _, variable in graph_nodes.variables(module))
    keeps = small.kept_outputs(out, precision, has_params, graph_nodes.is_node)
    return cast_outputs(
        out,
        args,
        precision.policy,
        policy_changes=spec.policy_changes,
        returns_carry=in_loop or isinstance(module, nnx.RNNCellBase),
        may_return_carry_only=in_loop,
        keeps=(lambda x: True) if is_few else keeps,
        is_leaf=graph_nodes.is_node,
    )


def _watched(module: Any) -> contextlib.AbstractContextManager[None]:
    if param_cast_proxy.is_running():
        return contextlib.nullcontext()
    return float32_products.watched(
        module, functools.partial(stored_arrays.in_half, module), stored_arrays.REPAIR
    )


def _arrays(params: Iterable[tuple[Any, nnx.Variable]]) -> list[Any]:
    return jax.tree.leaves([param.get_raw_value() for _, param in params])
