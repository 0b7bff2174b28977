"""Modules that need more than settings: a subclass whose calls cast parameters, inputs and results.

One subclass per class and specification, of the same name. Its methods run the author's on a proxy: another
object, of a subclass of the module's class, whose `__dict__` is the module's own.

    class Net(nnx.Module):          # net.w = nnx.Param(...), in float32
        def __call__(self, x):      # self is the proxy: vars(self) is vars(net)
            self.calls += 1         # read from and written to the very dictionary of net
            return x @ self.w       # __getattribute__ finds the Param there, and gives a view of it: float16
    assert net.calls == 1           # nothing is copied, so nothing can be stale

Only reading differs: what is seen in place of Params, and of objects that hold some, is in `param_view`. What
is assigned or returned is the Param or object itself. The cast happens where the value is read; inside
`nnx.remat`, what is saved is the parameter and not a second copy of it.
"""

import contextlib
import copyreg
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp_policy._src.core.dtypes import is_dtype_or_none, is_half
from jmp_policy._src.flax import compat, float32_products
from jmp_policy._src.flax.nnx import governed_calls, graph_nodes, layers, stored_arrays
from jmp_policy._src.flax.nnx.governed_calls import CLASSES, RUNS, Run, subclass
from jmp_policy._src.flax.nnx.graph_nodes import governed_methods, specification
from jmp_policy._src.policy import half_errors
from jmp_policy._src.policy.module_precision import GovernedCall, ModulePrecision, shapes_of
from jmp_policy._src.policy.rules import PolicyMap, wants_fp32_weight_grads
from jmp_policy._src.products.functions import stand_in
from jmp_policy._src.weight_grads import param_casts, transform


@dataclasses.dataclass(frozen=True)
class Specification:
    """How a module is governed.

    Args:
      precision: its policy, and whether it is a float32 island.
      policy_changes: whether the code around it is under another policy, so that the output dtype applies.
      methods: the methods that are governed, as far as the class has them.
      rules: of a model as a whole, those that it was wrapped with; None for its parts.
    """

    precision: ModulePrecision
    policy_changes: bool
    methods: tuple[str, ...]
    rules: PolicyMap | None = None


def governed_class(bare: type, spec: Specification) -> type:
    """The subclass that stands in for `bare`; the same for equal specifications, so that caches hit."""
    with CLASSES:
        return _made_governed_class(bare, spec)


@functools.cache
def _made_governed_class(bare: type, spec: Specification) -> type:
    namespace: dict[str, Any] = {
        "__reduce__": _reduce,
        "_jmp_policy_specification": spec,
        "_jmp_policy_bare": bare,
    }
    for name in governed_methods(bare, spec.methods):
        namespace[name] = _entry(bare, name)
    class_dtype = inspect.getattr_static(bare, "dtype", None)
    if class_dtype is not None and not isinstance(class_dtype, property) and is_dtype_or_none(class_dtype):
        namespace["dtype"] = layers.scalar_type(spec.precision.compute_dtype)
    return subclass(bare, namespace, _metaclass(type(bare)))


@functools.cache
def _metaclass(base: type) -> type:
    """A metaclass whose classes can be pickled, as graph definitions that name them are."""
    meta = type(base.__name__, (base,), {})
    copyreg.pickle(meta, _reduce_class)  # type: ignore[arg-type]
    return meta


def _reduce_class(cls: Any) -> Any:
    if "_jmp_policy_bare" not in vars(cls):
        return cls.__qualname__  # A class that somebody derived from a governed one.
    spec = cls._jmp_policy_specification
    if spec.rules is not None and not all(isinstance(p, str | type) for p, _ in spec.rules.overrides):
        spec = dataclasses.replace(spec, rules=None)  # A predicate may be a lambda, and only reports ask.
    return governed_class, (cls._jmp_policy_bare, spec)


def _reduce(self: Any) -> Any:
    return object.__new__, (type(self),), self.__getstate__()


def _entry(bare: type, name: str) -> Callable[..., Any]:
    method: Any = inspect.getattr_static(bare, name)

    @functools.wraps(getattr(bare, name), updated=())
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(bare, method, self, args, kwargs)

    return entry


def _run(bare: type, method: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a method of the bare class under the module's specification."""
    spec = specification(module)
    assert spec is not None
    precision = spec.precision
    if wants_fp32_weight_grads(precision.policy) and not param_casts.TRACED_FOR_IT.value:
        from jmp_policy._src.flax.nnx.states import transformed

        run = transformed(functools.partial(_run, bare, method), transform.with_float32_gradients)
        return run(module, args, kwargs)
    in_loop = governed_calls.is_loop_body()
    own = [param.get_raw_value() for _, param in graph_nodes.own_params(module)]
    inputs = GovernedCall(precision, shapes_of(jax.tree.leaves(own)), args, kwargs, graph_nodes.is_node)
    try:
        with inputs.inside(), _watched(module), opened(module, inputs.precision) as proxy:
            new_args, new_kwargs = inputs.cast_inputs()
            out = governed_calls.original(bound(method, proxy)(*new_args, **new_kwargs))
    except half_errors.KINDS as error:
        half_errors.explain(error, bare.__name__, bare.__name__, inputs.precision)
        raise
    is_few = precision.island and layers.sums_few(module) and layers.has_few_results(module)
    return inputs.cast_outputs(
        out,
        policy_changes=spec.policy_changes,
        has_params=any(isinstance(variable, nnx.Param) for _, variable in graph_nodes.variables(module)),
        returns_carry=isinstance(module, nnx.RNNCellBase),
        in_loop=in_loop,
        keeps=True if is_few else None,
    )


def _watched(module: Any) -> contextlib.AbstractContextManager[None]:
    if RUNS.stack:
        return contextlib.nullcontext()
    stored = functools.partial(stored_arrays.by_path, module)
    return float32_products.watched(module, stored, stored_arrays.REPAIR)


@contextlib.contextmanager
def opened(module: Any, precision: ModulePrecision) -> Iterator[Any]:
    """Gives the proxy of a module, whose own Params are read by a precision, for the length of a call."""
    run, before = Run(known=governed_calls.held(vars(module))), RUNS.stack
    state = governed_calls.float32_state(run.known.values()) if is_half(precision.compute_dtype) else ()
    RUNS.stack = (*before, run)
    try:
        yield _proxied(module, precision, run)
    finally:
        RUNS.stack = before
        governed_calls.store_new(vars(module), run.known, precision)
        for variable in state:
            stored_arrays.store_in(variable, np.dtype(np.float32))


def _proxied(node: Any, precision: ModulePrecision, run: Run) -> Any:
    """A new proxy of a node."""
    with CLASSES:
        cls = _proxy_class(type(node), precision)
    proxy = object.__new__(cls)
    object.__setattr__(proxy, "__dict__", vars(node))
    run.proxies.append((proxy, node))
    return proxy


@functools.cache
def _proxy_class(outer: type, precision: ModulePrecision) -> type:
    bare: Any = graph_nodes.bare_class(outer)
    # Layers of Flax cast their own; where gradients are to be float32, the cast must be ours.
    casts_itself = layers.is_flax(bare) and issubclass(bare, layers.WITH_OWN_PARAMS)
    casts_itself = casts_itself and not wants_fp32_weight_grads(precision.policy)

    def getattribute(self: Any, name: str) -> Any:
        value = bare.__getattribute__(self, name)
        if type(value) in graph_nodes.PLAIN:
            # Layers of Flax keep the product that they call.
            is_product = name == "dot_general" and precision.compute_dtype == jnp.bfloat16
            return stand_in(value, jnp.bfloat16) if is_product else value
        attributes = object.__getattribute__(self, "__dict__")
        is_users = name in attributes and not name.startswith("__") and not compat.is_bookkeeping(name)
        if not is_users or graph_nodes.is_called(value):
            return value
        if casts_itself and (name in layers.OWN_PARAMS or not graph_nodes.is_node(value)):
            return value
        from jmp_policy._src.flax.nnx import param_view

        return param_view.seen(bare, name, value, precision, _proxied)

    def setattribute(self: Any, name: str, value: Any) -> None:
        from jmp_policy._src.flax.nnx import param_view

        before = dict(vars(self))
        bare.__setattr__(self, name, value)
        param_view.put_right(vars(self), before, precision)

    namespace: dict[str, Any] = {
        "__getattribute__": getattribute,
        "__setattr__": setattribute,
        "_jmp_policy_proxy_of": outer,
    }
    if bare is not outer and "dtype" in vars(outer):
        namespace["dtype"] = vars(outer)["dtype"]
    return subclass(bare, namespace)


def bound(method: Any, module: Any) -> Any:
    """A method as it is read from a module."""
    return method.__get__(module, type(module)) if hasattr(method, "__get__") else method
