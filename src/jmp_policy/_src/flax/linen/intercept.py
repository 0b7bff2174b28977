"""The method interceptor: what happens when a governed Linen module is called.

Parameters are cast where they are used, by shadowing `module.param` on the instance for the length of a
call. jmp and Haiku cast the whole parameter tree in front of the model, which leaves a second copy of it
alive; casting inputs alone does nothing, since `Dense(dtype=None)` promotes back to float32.
"""

import contextlib
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core.cast import is_floating_array
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.imported import imported_attr
from jmp_policy._src.flax import compat, float32_products
from jmp_policy._src.flax.linen import layers
from jmp_policy._src.flax.linen.module_precision import governed_place, is_detached
from jmp_policy._src.flax.linen.places import Place, place_of
from jmp_policy._src.flax.linen.scope_reads import cast_scope_reads
from jmp_policy._src.flax.linen.shadowing import shadowed
from jmp_policy._src.policy import inputs
from jmp_policy._src.policy.boundary import cast_outputs, policy_changes
from jmp_policy._src.policy.half_errors import explained
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.regions import region
from jmp_policy._src.policy.rules import (
    PolicyMap,
    PolicyMapLike,
    as_policy_map,
    check_grad_dtypes,
    path_text,
)
from jmp_policy._src.policy.scope import Scope, Seen, current, entered
from jmp_policy._src.weight_grads import transform

#: What to do about a variable that is used as it is stored.
_REPAIR = (
    'Read it with self.param or self.get_variable("params", name) in a method of the module that owns it, '
    "or cast it (.astype(x.dtype))."
)


class intercept(contextlib.ContextDecorator):  # noqa: N801 - used like a function
    """Runs the Linen modules called in a with-block, or in a decorated function, under a policy.

    Usable around `module.apply` and inside a module's method; the innermost policy wins. Inside a method of
    a governed module path patterns count from that module, elsewhere from the root. Values that a module
    returns straight to the code in the block have the policy's output dtype. One object may be entered again
    and by several threads.

    Modules of one `nn.jit` class share one trace where their fields are equal, so that rules cannot tell
    them apart by their paths; call `nn.jit` once for each.

    As a decorator of a module's method the method itself is governed too: its arguments, parameters and
    results are cast as if it were the `__call__` of a module of its own.

    Args:
      policy: a `PolicyMap`, a `Policy` or its text.

    Raises:
      ValueError, TypeError: for something that is no policy, when it is made.

    Example:
      >>> import jax, flax.linen as nn, jax.numpy as jnp
      >>> model, x = nn.Dense(2), jnp.ones((1, 3))
      >>> params = model.init(jax.random.key(0), x)
      >>> with intercept("p=f32,c=f16,o=f16"):
      ...     model.apply(params, x).dtype
      dtype('float16')
    """

    def __init__(self, policy: PolicyMapLike):
        self.rules: PolicyMap = as_policy_map(policy)
        check_grad_dtypes(self.rules)
        self._entered = threading.local()

    def __enter__(self) -> Scope:
        stack = contextlib.ExitStack()
        place = running_place()
        root_path = () if place is None else place.path
        scope = stack.enter_context(pushed(self._scope(root_path, place)))
        self._stacks.append(stack)
        return scope

    def __exit__(self, *exc: Any) -> None:
        self._stacks.pop().close()

    def _scope(self, root_path: tuple[str, ...], place: Place | None) -> Scope:
        return Scope(self.rules, root_path=root_path, place=place, model=weakref.ref(self))

    @property
    def _stacks(self) -> list[contextlib.ExitStack]:
        if not hasattr(self._entered, "stacks"):
            self._entered.stacks = []
        return self._entered.stacks

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def governed(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], nn.Module) and args[0].scope is not None:
                (module, *rest), running = args, running_place()
                root_path = place_of(module, running).path
                with pushed(self._scope(root_path, running)) as scope:
                    call = functools.partial(function, module)
                    return _call_governed(scope, module, call, tuple(rest), kwargs)
            with self:
                return function(*args, **kwargs)

        return governed

    def __repr__(self) -> str:
        return f"intercept({self.rules!r})"

    def __reduce__(self) -> Any:
        # What is entered belongs to threads of this process.
        return type(self), (self.rules,)


@contextlib.contextmanager
def pushed(scope: Scope) -> Iterator[Scope]:
    """Makes a scope active, with exactly one interceptor of ours on Flax's stack."""
    outer = current()
    with contextlib.ExitStack() as stack:
        if outer is None:
            stack.enter_context(nn.intercept_methods(_interceptor))
        else:
            scope = dataclasses.replace(scope, half_modules=outer.half_modules)
        yield stack.enter_context(entered(scope))


def running_place() -> Place | None:
    """Returns where the module is in whose method we are, if it is governed."""
    outer = current()
    return None if outer is None else outer.place


def _interceptor(
    next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    scope, module = current(), context.module
    if scope is None or module.scope is None or not is_method(module, context.method_name):
        return next_fun(*args, **kwargs)
    if scope.mark_only:
        return _call_marked(scope, module, next_fun, args, kwargs)
    if transform.starts(scope.rules) and not module.is_initializing() and context.method_name != "setup":
        method: Any = context.orig_method
        return _call_with_float32_gradients(scope, module, method.func, args, kwargs)
    if context.method_name == "setup":
        with _governed(scope, module):
            return next_fun(*args, **kwargs)
    return _call_governed(scope, module, next_fun, args, kwargs)


@contextlib.contextmanager
def marking(rules: PolicyMap) -> Iterator[Scope]:
    """Lets each module that is called mark its operations with the policy that governs it; casts nothing.

    For `autocast`, which reads the marks.
    """
    with pushed(Scope(rules, mark_only=True, seen=_seen_under(rules))) as scope:
        yield scope


@functools.cache
def _seen_under(_: PolicyMap) -> Seen:
    """Returns what equal rules have met so far: a function that they once traced calls no module again."""
    return Seen(set(), set())


def _call_marked(scope: Scope, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    precision, place = governed_place(scope, module)
    policy = precision.policy
    with entered(dataclasses.replace(scope, caller=policy, place=place)):
        outer = scope.caller or scope.rules.default
        if (policy.compute_dtype, policy.recipe) == (outer.compute_dtype, outer.recipe):
            return call(*args, **kwargs)
        with region(policy):
            return call(*args, **kwargs)


def is_method(module: nn.Module, name: str) -> bool:
    """Returns whether the module's class has such a method, and Python does not call it (`__getattr__`).

    Lifted transforms show their inner functions as methods of the module ("scan_fn", "<lambda>").
    """
    special = name.startswith("__") and name != "__call__"
    return not special and callable(getattr(type(module), name, None))


def _call_with_float32_gradients(
    scope: Scope, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Runs a method as a function of the module's variables (as `nn.jit` does), whose gradients are float32.

    Args:
      scope: the active scope.
      module: the outermost governed module.
      method: the function that its class has.
      args, kwargs: what it is called with.
    """

    def float32_gradients(clone: nn.Module, args: Any, kwargs: Any) -> Any:
        active = current()
        assert active is not None
        return _call_governed(active, clone, functools.partial(method, clone), args, kwargs)

    function = nn.compact(float32_gradients) if compat.is_compact(method) else float32_gradients
    transformed = functools.partial(transform.with_float32_gradients, opens_scope=True)
    with entered(dataclasses.replace(scope, cloned=place_of(module, scope.place).path)):
        return compat.over_variables(transformed, function, module, args, kwargs)


def _call_governed(scope: Scope, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs one method: inputs to compute dtype, parameters cast at use, outputs where the policy changes."""
    given = (args, kwargs)
    with _governed(scope, module, given) as (precision, place):
        if scope.caller is not None and scope.place.is_of(place):
            # A method called by a method of the same module: the policy does not change, and what it computed
            # in float32 on purpose (logits for its loss method) must stay so.
            return call(*args, **kwargs)
        with inputs.entered(given) as small, _explained(scope, place, precision):
            new_args, new_kwargs = _cast_inputs(precision, module, args, kwargs, small)
            out = call(*new_args, **new_kwargs)
    is_boundary = policy_changes(scope.caller, precision.policy)
    may_be_scanned = not is_boundary or is_detached(scope, module, place)
    return cast_outputs(
        out,
        args,
        precision.policy,
        policy_changes=is_boundary,
        may_be_scanned=may_be_scanned,
        may_return_carry_only=scope.caller is not None and _is_loop_body(args, precision),
        kept_rank=small.output_rank(precision),
    )


def _explained(
    scope: Scope, place: Place, precision: ModulePrecision
) -> contextlib.AbstractContextManager[None]:
    path, name = scope.relative(place.path), place.kind.__name__
    return explained(f"{name} at {path!r}" if path else name, f'"{path}"' if path else name, precision)


def _is_loop_body(args: Any, precision: ModulePrecision) -> bool:
    """Returns whether a loop in the code of the module above runs a method on a carry in another dtype.

    Such a carry (`jnp.zeros(shape)`) must come back in the dtype it came in.
    """
    dtype, calls = precision.compute_dtype, 0
    if not any(is_floating_array(x) and x.dtype != dtype for x in jax.tree.leaves(args[:1])):
        return False

    def is_second_call(frame: types.FrameType) -> bool:
        nonlocal calls
        calls += frame.f_code is _call_governed.__code__
        return calls == 2  # The first is of the method itself.

    return compat.is_traced_by_loop(is_second_call)


@contextlib.contextmanager
def _governed(scope: Scope, module: nn.Module, given: Any = ()) -> Iterator[tuple[ModulePrecision, Place]]:
    """Overrides a module's fields and shadows its `param` for the length of a call."""
    if scope.half_modules is None and not module.is_initializing():
        scope = dataclasses.replace(scope, half_modules={})
        stored = functools.partial(_stored, scope, module)
        with (
            float32_products.watched(scope.model(), stored, _REPAIR),
            _governed(scope, module, given) as found,
        ):
            yield found
        return
    precision, place = governed_place(scope, module)
    if scope.half_modules is not None:
        is_in_half = is_half(precision.used_param_dtype)
        scope.half_modules[place.path] = type(module) if is_in_half else None
        if is_in_half:
            cast_scope_reads(module.scope, module)
    inner = dataclasses.replace(scope, caller=precision.policy, place=place)
    with entered(inner), shadowed(scope, module, precision, given):
        yield precision, place


def _stored(scope: Scope, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The variables of the outermost module, and those below it, that belong to modules in half precision.

    A module that has not run belongs to the next one above it.
    """
    start, half_modules = place_of(module, scope.place).path, scope.half_modules
    bridge = imported_attr("flax.nnx.bridge", "ToLinen") or ()
    for keys, array in jax.tree_util.tree_leaves_with_path(nn.meta.unbox(module.variables)):
        collection, *names = (str(getattr(key, "key", key)) for key in keys)
        path = (*start, *names)
        owner = next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in half_modules)
        kind = half_modules[owner]
        if kind is not None and not issubclass(kind, bridge):  # An NNX module looks at its variables itself.
            text = path_text(path)
            yield text if collection == "params" else f"{text} of {collection}", array


def _cast_inputs(
    precision: ModulePrecision, module: nn.Module, args: Any, kwargs: Any, small: inputs.SmallInputs
) -> tuple[Any, Any]:
    if precision.island:
        # What arrives in float32 (an image) is normalised as such: half would lose its range.
        return args, kwargs
    kept = args[:1] if layers.keeps_carry(module) else ()
    cast = functools.partial(inputs.cast_inputs, precision=precision, small=small)
    return (*kept, *cast(args[len(kept) :])), cast(kwargs)
