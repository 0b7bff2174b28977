"""The method interceptor: what happens when a governed Linen module is called.

Parameters are cast where they are used, by shadowing `module.param` on the instance for the length of a
call. jmp and Haiku cast the whole parameter tree in front of the model, which leaves a second copy of it
alive; casting inputs alone does nothing, since `Dense(dtype=None)` promotes back to float32.
"""

import contextlib
import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.core import lift
from flax.linen import transforms

from jmp_policy import _cpu_bfloat16
from jmp_policy._border import cast_results
from jmp_policy._cast import cast_floating
from jmp_policy._dtypes import is_dtype_or_none, is_half, widened
from jmp_policy._loaded import is_instance_of
from jmp_policy._policy import Policy
from jmp_policy._regions import region
from jmp_policy._rules import (
    PolicyMap,
    PolicyMapLike,
    as_policy_map,
    check_grad_dtypes,
    matches,
    path_text,
)
from jmp_policy._scope import Scope, Seen, current, entered
from jmp_policy._treatment import Treatment
from jmp_policy._weights import _function as _weights
from jmp_policy._weights._mark import cast_weight
from jmp_policy.linen import _layers


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
        self.rules = as_policy_map(policy)
        check_grad_dtypes(self.rules)
        self._entered = threading.local()

    def __enter__(self) -> Scope:
        stack = contextlib.ExitStack()
        scope = stack.enter_context(_pushed(Scope(self.rules, base=_running_module_path())))
        self._stacks.append(stack)
        return scope

    def __exit__(self, *exc: Any) -> None:
        self._stacks.pop().close()

    @property
    def _stacks(self) -> list[contextlib.ExitStack]:
        if not hasattr(self._entered, "stacks"):
            self._entered.stacks = []
        return self._entered.stacks

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def governed(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], nn.Module) and args[0].scope is not None:
                module, *rest = args
                with _pushed(Scope(self.rules, base=module.path)) as scope:
                    call = functools.partial(function, module)
                    return _call_governed(scope, module, call, tuple(rest), kwargs)
            with self:
                return function(*args, **kwargs)

        return governed

    def __repr__(self) -> str:
        return f"intercept({self.rules!r})"


@contextlib.contextmanager
def _pushed(scope: Scope) -> Iterator[Scope]:
    """Makes a scope active, with exactly one interceptor of ours on Flax's stack."""
    with contextlib.ExitStack() as stack:
        if current() is None:
            stack.enter_context(nn.intercept_methods(_interceptor))
        yield stack.enter_context(entered(scope))


def _running_module_path() -> tuple[str, ...]:
    """Path of the module in whose method we are, if that method is governed; else the root's."""
    outer = current()
    return outer.here[0] if outer is not None and outer.here is not None else ()


def _interceptor(
    next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    scope, module = current(), context.module
    if scope is None or module.scope is None or not is_method(module, context.method_name):
        return next_fun(*args, **kwargs)
    if scope.marks:
        return _call_marked(scope, module, next_fun, args, kwargs)
    if _weights.starts(scope.rules) and not module.is_initializing() and context.method_name != "setup":
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
    with _pushed(Scope(rules, marks=True, seen=_seen_under(rules))) as scope:
        yield scope


@functools.cache
def _seen_under(_: PolicyMap) -> Seen:
    """What equal rules have met so far: a jitted function that they once traced calls no module again."""
    return Seen(set(), set())


def _call_marked(scope: Scope, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    policy = _treatment(scope, module).policy
    with entered(dataclasses.replace(scope, caller=policy, here=_identity(module))):
        if policy.compute_dtype == (scope.caller or scope.rules.default).compute_dtype:
            return call(*args, **kwargs)
        with region(policy):
            return call(*args, **kwargs)


def is_method(module: nn.Module, name: str) -> bool:
    """Whether the module's class has such a method, and not one that Python calls (`__getattr__`).

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

    def lifted(fn: Callable[..., Any], scopes: Any, *given: Any) -> Any:
        def inner(scope_of: Any, repacked: Any, variables: Any, rngs: Any, *given: Any) -> Any:
            def pure(variables: Any, rngs: Any, given: Any) -> Any:
                scopes = scope_of(variables, rngs)
                return fn(scopes, *given), repacked(scopes)

            return _weights.with_float32_gradients(pure, opens_scope=True)(variables, rngs, given)

        return lift.pack(inner, (True,), (True,), (True,))(scopes, *given)

    def float32_gradients(clone: nn.Module, args: Any, kwargs: Any) -> Any:
        active = current()
        assert active is not None
        return _call_governed(active, clone, functools.partial(method, clone), args, kwargs)

    if hasattr(method, "compact"):
        float32_gradients.compact = True  # type: ignore[attr-defined]
    with entered(dataclasses.replace(scope, cloned=module.path)):
        return transforms.lift_direct_transform(lifted, (float32_gradients,), module, args, kwargs)


def _call_governed(scope: Scope, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs one method: inputs to compute dtype, parameters cast at use, outputs at the border."""
    own_call = scope.here == _identity(module)
    with _governed(scope, module) as treatment, _cpu_bfloat16.scope(treatment.compute_dtype):
        if own_call:
            # A method called by a method of the same module: no border is crossed, and what it computed
            # in float32 on purpose (logits for its loss method) must stay so.
            return call(*args, **kwargs)
        new_args, new_kwargs = _cast_inputs(treatment, module, args, kwargs)
        out = call(*new_args, **new_kwargs)
    at_border = scope.caller != treatment.policy
    may_be_scanned = not at_border or _is_lifted(scope, module)
    return cast_results(out, args, treatment.policy, at_border=at_border, may_be_scanned=may_be_scanned)


def _treatment(scope: Scope, module: nn.Module) -> Treatment:
    rules = scope.rules
    policy, named, _ = _governing(scope, module) if rules.overrides else (rules.default, False, None)
    own = getattr(module, "dtype", None)
    keeps_own = rules.keep_module_dtypes and own is not None and "dtype" not in _original(module)
    if keeps_own and is_dtype_or_none(own):
        policy = dataclasses.replace(policy, compute_dtype=own)
    island = (
        rules.float32_islands and not named and is_half(policy.compute_dtype) and _layers.is_island(module)
    )
    return Treatment(policy, island)


def governing_rule(scope: Scope, module: nn.Module) -> tuple[Treatment, int | None]:
    """What is done with a module that is called in a scope, and the index of the rule that says so."""
    return _treatment(scope, module), _governing(scope, module)[2]


def _governing(scope: Scope, module: nn.Module) -> tuple[Policy, bool, int | None]:
    """The nearest match at or above a module: policy, whether the rule names the module itself, its index."""
    rules, path = scope.rules, scope.relative(module.path)
    matched = [i for i, (pattern, _) in enumerate(rules.overrides) if matches(pattern, path, module)]
    scope.seen.paths.add(path)
    scope.seen.matched.update(matched)
    if matched:
        return rules.overrides[matched[0]][1], rules.names(matched[0], module), matched[0]
    above = module
    while isinstance(above.parent, nn.Module) and above.parent.scope is not None:
        above = above.parent
        if above.path[: len(scope.base)] != scope.base:
            break
        index = rules.match(scope.relative(above.path), above)
        if index is not None:
            return rules.overrides[index][1], False, index
    # A module that a lifted transform runs has no parent; it belongs to the one whose code lifted it.
    lifted = _is_lifted(scope, above) and scope.caller is not None
    return (scope.caller if lifted else rules.default), False, None  # type: ignore[return-value]


def _is_lifted(scope: Scope, module: nn.Module) -> bool:
    """Whether a transform (nn.scan, nn.remat, nn.jit) runs the module: it has a scope, but no parent."""
    return not isinstance(module.parent, nn.Module) and module.path not in (scope.base, scope.cloned)


def _identity(module: nn.Module) -> Any:
    """Equal for a module and the clones of it that lifted transforms make."""
    return (module.path, type(module))


@contextlib.contextmanager
def _governed(scope: Scope, module: nn.Module) -> Iterator[Treatment]:
    """Overrides a module's fields and shadows its `param` for the length of a call."""
    treatment = _treatment(scope, module)
    inner = dataclasses.replace(scope, caller=treatment.policy, here=_identity(module))
    with entered(inner), _shadowed(scope, module, treatment):
        yield treatment


def _original(module: nn.Module) -> dict[str, Any]:
    """The fields of a module that are overridden just now, as they were; empty if none are."""
    return module.__dict__.get(_ORIGINAL, {})


_ORIGINAL = "_jmp_policy_original"


def is_handed_on(module: nn.Module, field: str) -> bool:
    """Whether a field is what the module's parent has by its policy: parents hand on their `dtype`."""
    parent = module.parent
    if not isinstance(parent, nn.Module) or field not in _original(parent):
        return False
    return getattr(parent, field) == getattr(module, field) != _original(parent)[field]


@contextlib.contextmanager
def _shadowed(scope: Scope, module: nn.Module, treatment: Treatment) -> Iterator[None]:
    new = {}
    if not (scope.rules.keep_module_dtypes and getattr(module, "dtype", None) is not None):
        new.update(_layers.field_overrides(module, treatment.policy, treatment.island))
    if scope.rules.float32_islands and is_half(treatment.compute_dtype):
        new.update(_layers.attention_overrides(module))
    if is_instance_of(module, "flax.nnx.bridge.wrappers", "ToLinen"):
        new["nnx_class"] = _under_rules(scope, module, treatment)
    state = module.__dict__
    # What an enclosing call of the same instance has put there already comes back afterwards.
    before = {name: state[name] for name in (*new, _ORIGINAL, *_SHADOWS) if name in state}
    original = {name: getattr(module, name) for name in new} | _original(module)
    state.update(new)
    state[_ORIGINAL] = original
    for name, make in _SHADOWS.items():
        if name not in before:
            state[name] = make(module)
    try:
        yield
    finally:
        for name in (*new, _ORIGINAL, *_SHADOWS):
            state.pop(name, None)
        state.update(before)


def _under_rules(scope: Scope, module: Any, treatment: Treatment) -> Callable[..., Any]:
    """The class of a bridged NNX module, with modules that are under the same rules as the bridge."""
    make, path = module.nnx_class, scope.relative(module.path)
    inside = scope.rules.below(path, treatment.policy).handing_on(treatment.policy)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # By name: what NNX needs of Linen for the other bridge is below it.
        nnx = importlib.import_module("jmp_policy.nnx")
        new, places = nnx.wrap_part(make(*args, **kwargs), inside)
        for below, part in places:
            whole = "/".join(filter(None, (path, path_text(below))))
            scope.seen.paths.add(whole)
            overrides = enumerate(scope.rules.overrides)
            scope.seen.matched.update(i for i, (pattern, _) in overrides if matches(pattern, whole, part))
        return new

    return wrapped


def _shadow_param(module: nn.Module) -> Callable[..., Any]:
    """`module.param` that creates in param dtype and returns in the dtype of use."""
    param = module.param

    @functools.wraps(param)
    def governed_param(
        name: str, init_fn: Callable[..., Any], *init_args: Any, unbox: bool = True, **init_kwargs: Any
    ) -> Any:
        scope = current()
        if scope is None:
            return param(name, init_fn, *init_args, unbox=unbox, **init_kwargs)
        # Looked up now, not when the method was entered: an `intercept` inside the method wins.
        treatment = _treatment(scope, module)
        draw_dtype = widened(treatment.param_dtype)

        def as_drawn(value: Any) -> Any:
            return draw_dtype if _same_dtype(value, treatment.compute_dtype) else value

        def init(*args: Any, **kwargs: Any) -> Any:
            # Modules hand self.dtype to initialisers, and close over it; initial values must be those of
            # the bare module, cast, and not drawn in half.
            with _fields(module, {k: as_drawn(v) for k, v in _original(module).items()}):
                value = init_fn(*map(as_drawn, args), **{k: as_drawn(v) for k, v in kwargs.items()})
            return cast_floating(value, treatment.param_dtype)

        value = param(name, init, *init_args, unbox=unbox, **init_kwargs)
        return cast_weight(value, treatment.used_param_dtype, treatment.policy)

    return governed_param


def _shadow_get_variable(module: nn.Module) -> Callable[..., Any]:
    """`module.get_variable` that casts what it reads from the parameters."""
    get_variable = module.get_variable

    @functools.wraps(get_variable)
    def governed_get_variable(col: str, name: str, default: Any = None) -> Any:
        value, scope = get_variable(col, name, default), current()
        if scope is None or col != "params":
            return value
        treatment = _treatment(scope, module)
        return cast_weight(value, treatment.used_param_dtype, treatment.policy)

    return governed_get_variable


_SHADOWS = {"param": _shadow_param, "get_variable": _shadow_get_variable}


@contextlib.contextmanager
def _fields(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    state = module.__dict__
    before = {name: state[name] for name in values}
    state.update(values)
    try:
        yield
    finally:
        state.update(before)


def _same_dtype(value: Any, dtype: np.dtype) -> bool:
    """Whether an argument of an initialiser is the half type that the policy put into `dtype` fields."""
    if not is_half(dtype) or not isinstance(value, type | np.dtype | str):
        return False
    try:
        return jax.numpy.dtype(value) == dtype
    except TypeError:
        return False


def _cast_inputs(treatment: Treatment, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if treatment.island:
        # What arrives in float32 (an image) is normalised as such: half would lose its range.
        return args, kwargs
    dtype = treatment.compute_dtype
    if _layers.keeps_carry(module) and args:
        return (args[0], *cast_floating(args[1:], dtype)), cast_floating(kwargs, dtype)
    return cast_floating((args, kwargs), dtype)
