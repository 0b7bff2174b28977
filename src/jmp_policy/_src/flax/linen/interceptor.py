"""The method interceptor: what happens when a governed Linen module is called.

The idea, without rules, islands, loops, small inputs and nested models::

    def interceptor(next_fun, args, kwargs, context):
        module, policy = context.module, active_policy()

        def param(name, init_fn, *init_args):               # float32 in the tree of parameters
            value = type(module).param(module, name, init_fn, *init_args)
            return policy.cast_to_compute(value)            # half where it is used

        own_dtype = module.dtype
        vars(module).update(param=param, dtype=policy.compute_dtype)
        try:
            out = next_fun(*policy.cast_to_compute(args), **policy.cast_to_compute(kwargs))
        finally:
            del module.param
            vars(module).update(dtype=own_dtype)
        return policy.cast_to_output(out) if is_outermost(module) else out

jmp and Haiku cast the whole parameter tree in front of the model, which leaves a second copy of it alive.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core.dtypes import is_floating_array, is_half
from jmp_policy._src.flax import compat, float32_products
from jmp_policy._src.flax.linen import layers, special_calls
from jmp_policy._src.flax.linen.governing import Location, governed, locate
from jmp_policy._src.flax.linen.shadowing import shadow
from jmp_policy._src.policy import half_errors
from jmp_policy._src.policy.module_precision import GovernedCall, ModulePrecision, policy_changes
from jmp_policy._src.policy.rules import any_is_nvfp4, any_wants_fp32_weight_grads
from jmp_policy._src.policy.scope import ACTIVE, Scope
from jmp_policy._src.weight_grads import param_casts


@contextlib.contextmanager
def pushed(scope: Scope) -> Iterator[Scope]:
    """Makes a scope active, with exactly one interceptor of ours on Flax's stack."""
    outer = ACTIVE.value
    if outer is not None:
        scope = dataclasses.replace(scope, half_modules=outer.half_modules)
    with nn.intercept_methods(_interceptor) if outer is None else contextlib.nullcontext(), ACTIVE(scope):
        yield scope


def running_location() -> Location | None:
    """Where the module is in whose method we are, if it is governed."""
    outer = ACTIVE.value
    return None if outer is None else outer.location


def _interceptor(
    next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    scope, module, name = ACTIVE.value, context.module, context.method_name
    if scope is None or module.scope is None or not is_method(module, name):
        return next_fun(*args, **kwargs)
    if scope.mark_only:
        return special_calls.call_marked(scope, module, next_fun, args, kwargs)
    if name == "setup":
        precision, location = governed(scope, module)
        out = _call_shadowed(scope, module, precision, location, (), next_fun)
        if (path := locate(module, scope.location).path) != location.path:  # By `nn.share_scope`.
            scope.seen.moved[scope.relative(location.path)] = scope.relative(path)
        return out
    wants_float32 = any_wants_fp32_weight_grads(scope.rules) and not param_casts.TRACED_FOR_IT.value
    if wants_float32 and not module.is_initializing():
        method: Any = context.orig_method
        call = special_calls.call_with_float32_gradients
        return call(call_governed, scope, module, method.func, args, kwargs)
    return call_governed(scope, module, next_fun, args, kwargs)


def is_method(module: nn.Module, name: str) -> bool:
    """Whether the module's class has such a method, and Python does not call it (`__getattr__`).

    Lifted transforms show their inner functions as methods of the module ("scan_fn", "<lambda>").
    """
    special = name.startswith("__") and name != "__call__"
    return not special and callable(getattr(type(module), name, None))


def call_governed(scope: Scope, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs one method: casts inputs that it reads, parameters at use, outputs where the policy changes."""
    precision, location = governed(scope, module)
    sums_few_numbers = layers.sums_few(module, precision, args, kwargs)
    if sums_few_numbers:
        precision = precision.as_island()
    own = () if precision.island else layers.own_params(module)
    inputs = GovernedCall(precision, own, args, kwargs)
    shadowed = functools.partial(_call_shadowed, scope, module, inputs.precision, location, (args, kwargs))
    running = scope.location
    if scope.caller is not None and (running.path, running.cls) == (location.path, location.cls):
        # A method called by a method of the same module, or of a clone in a lifted transform: the policy does
        # not change, and what it computed in float32 on purpose (logits for its loss) must stay so.
        return shadowed(functools.partial(call, *args, **kwargs))

    def call_with_cast_inputs() -> Any:
        new_args, new_kwargs = inputs.cast_inputs()
        return call(*new_args, **new_kwargs)

    try:
        with inputs.inside():
            out = shadowed(call_with_cast_inputs)
    except half_errors.KINDS as error:
        path, name = scope.relative(location.path), location.cls.__name__
        shown = (f"{name} at {path!r}", f'"{path}"') if path else (name, name)
        half_errors.explain(error, *shown, inputs.precision)
        raise
    changes = policy_changes(scope.caller, precision.policy)
    dtype = precision.policy.output_dtype if changes else precision.compute_dtype
    return inputs.cast_outputs(
        out,
        policy_changes=changes,
        has_params=bool(layers.all_params(module)),
        returns_carry=scope.caller is not None and layers.is_recurrent(module),
        in_loop=scope.caller is not None and _is_loop_body(args, dtype),
        keeps=layers.has_few_results(module) if sums_few_numbers else None,
    )


def _call_shadowed(
    scope: Scope,
    module: nn.Module,
    precision: ModulePrecision,
    location: Location,
    inputs: Any,
    call: Callable[[], Any],
) -> Any:
    """Runs a method of a module while its fields and its `param` follow the policy."""
    watching: Any = contextlib.nullcontext()
    if scope.half_modules is None and not module.is_initializing():
        last = special_calls.last_blocks_inside(scope, module) if any_is_nvfp4(scope.rules) else frozenset()
        scope = dataclasses.replace(scope, half_modules={}, last=last)
        stored = functools.partial(special_calls.stored_by_path, scope, module)
        watching = float32_products.watched(scope.model(), stored, special_calls.REPAIR)
    if scope.half_modules is not None:
        is_in_half = is_half(precision.used_param_dtype)
        scope.half_modules.setdefault(location.path, type(module) if is_in_half else None)
        if isinstance(module, layers.WEIGHT_NORMS):  # With the weights of another layer, in float32.
            scope.half_modules[locate(module.layer_instance, scope.location).path] = None
    active = ACTIVE(scope.inside(precision.policy, location))
    with watching, active, shadow(scope, module, precision, location, inputs):
        return call()


def _is_loop_body(args: Any, dtype: Any) -> bool:
    """Whether a loop in the code of the module above runs a method on a carry in another dtype than this.

    Such a carry (`jnp.zeros(shape)`) must come back in the dtype it came in.
    """
    given = {x.dtype for x in jax.tree.leaves(args[:1]) if is_floating_array(x)}
    if given <= {dtype}:
        return False
    calls = 0

    def is_second_call(frame: types.FrameType) -> bool:
        nonlocal calls
        calls += frame.f_code is call_governed.__code__
        return calls == 2  # The first is of the method itself.

    return compat.is_traced_by_loop(is_second_call)
