"""A Linen module under a policy, as a module of the same kind.

The wrapped module is an instance of a subclass of the module's class, of the same name. Its `apply` is that
of the bare module, run inside `intercept`; so are its methods, where it is a submodule of another one. So it
has the same fields, the same variable tree and the same automatic names as the bare module, and equals
another wrap of an equal one. A wrapper module of its own would add a level to every checkpoint.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax

from jmp_policy._src.core.classes import make_subclass
from jmp_policy._src.flax import compat
from jmp_policy._src.flax.linen import special_calls
from jmp_policy._src.flax.linen.governing import locate
from jmp_policy._src.flax.linen.interceptor import pushed, running_location
from jmp_policy._src.flax.linen.unused_rules import check_used
from jmp_policy._src.policy.patterns import wrapped_twice
from jmp_policy._src.policy.rules import PolicyMap, PolicyMapLike, as_policy_map
from jmp_policy._src.policy.scope import ACTIVE, Scope, in_trial

M = TypeVar("M", bound=nn.Module)

#: Module's own methods through which a model is run.
_RUNS = ("apply", "init_with_output", "lazy_init")

#: Attributes of a wrapped class.
RULES, _BARE = "_jmp_policy_rules", "_jmp_policy_bare"

#: Instance attributes: the rules were checked to match; where the rules count paths from.
CHECKED = "_jmp_policy_checked"
_BASE = "_jmp_policy_base"


def wrap(module: M, policy: PolicyMapLike) -> M:
    """Puts a Linen module under a policy.

    Args:
      module: an instance of `flax.linen.Module`; it is not changed.
      policy: a `PolicyMap`, a `Policy` or its text.

    Returns:
      A module with the same fields, variables and names: `init`, `init_with_output`, `apply`, `tabulate`,
      `bind`, `lazy_init`, use as a submodule, hashing, comparing and pickling work as before.

    Raises:
      TypeError: for something that is no Linen module instance.
      ValueError: for a module that is wrapped already, under another policy; at the first `init` or `apply`,
        for rules that match no module, naming the nearest paths.

    Example:
      >>> import jax, flax.linen as nn, jax.numpy as jnp
      >>> model = wrap(nn.Dense(2), "mixed_float16")
      >>> x = jnp.ones((1, 3))
      >>> y, variables = model.init_with_output(jax.random.key(0), x)
      >>> y.dtype, variables["params"]["kernel"].dtype
      (dtype('float32'), dtype('float32'))
    """
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise TypeError(f"wrap takes a module, not its class: wrap({module.__name__}(...), policy).")
    if not isinstance(module, nn.Module):
        raise TypeError(f"linen.wrap takes a flax.linen.Module, got {type(module).__name__}.")
    name, old = bare_class(module).__name__, vars(type(module)).get(RULES)
    rules = as_policy_map(policy, name)
    if old not in (None, rules):
        raise wrapped_twice(name, old, rules)
    return with_class(module, wrapped_class(bare_class(module), rules))


def bare_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module as its author wrote it.

    One that somebody derived from a wrapped class (`nn.remat(type(model))`) is itself what its author wrote.
    """
    return vars(type(module)).get(_BARE, type(module))


def with_class(module: Any, cls: type[nn.Module]) -> Any:
    """The module with another class, over the same scope if it is bound."""
    # A bound one is viewed: Flax replaces its `scope` after each call, and both objects must see that.
    new = module.clone(parent=module.parent) if module.scope is None else _view(module, type(module))
    object.__setattr__(new, "__class__", cls)
    return new


def _view(module: Any, cls: type[nn.Module]) -> Any:
    """An object of another class with the same state."""
    view = object.__new__(cls)
    object.__setattr__(view, "__dict__", module.__dict__)
    return view


@functools.cache
def wrapped_class(bare: type[nn.Module], rules: PolicyMap) -> type[nn.Module]:
    """One class per module class and rules, so that equal wraps are equal and jit caches hit."""
    namespace: dict[str, Any] = {
        "__repr__": _repr(bare),
        "__reduce__": _reduce,
        "__getattribute__": _getattribute(bare),
        RULES: rules,
        _BARE: bare,
        **compat.copied_fields(bare),
    }
    for name in sorted(compat.managed_methods(bare) | {"setup"}):
        if name == "__call__" or not name.startswith("__"):
            namespace[name] = _entry(bare, name)
    for name in _RUNS:
        namespace[name] = _run(bare, name)
    # Flax's own hook for subclasses does not run either: the new class has no fields or methods for it to
    # manage, and it would put a new `__init__` in place of one that the author has replaced.
    return make_subclass(bare, namespace, root=nn.Module)


def _entry(bare: type[nn.Module], name: str) -> Callable[..., Any]:
    """A method of the wrapped class: the bare one, inside the policy."""
    method = getattr(bare, name)

    @functools.wraps(method, updated=())
    def entry(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None or not hasattr(type(self), RULES):  # `apply` of the bare module runs.
            return method(self, *args, **kwargs)
        # On a view, which is of the bare class for a module that asks about its own. A class that somebody
        # derived from a wrapped one has methods of its own.
        is_plain = bare_class(self) is bare and not hasattr(bare, RULES)
        module = _view(self, bare) if is_plain else self
        with _active(self, check_all=name == "__call__"):
            return method(module, *args, **kwargs)

    return entry


def _run(bare: type[nn.Module], name: str) -> Callable[..., Any]:
    """`apply` or its like: whatever it calls, `method=` included, runs inside the policy."""
    run = getattr(bare, name)

    @functools.wraps(run)
    def governed_run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        whole = kwargs.get("method") in (None, "__call__")
        variables = args[0] if name == "apply" and args else kwargs.get("variables")
        is_plain = bare_class(self) is bare
        # Flax runs a copy of a module that is not bound. One of the bare module needs no entries, unless its
        # class derives from a wrapped one and has entries of its own.
        takes_short_way = is_plain and self.scope is None and not hasattr(bare, RULES)
        with _active(self, check_all=whole, variables=variables) as scope:
            out = run(_view(self, bare) if takes_short_way else self, *args, **kwargs)
        draws_again = name != "apply" and scope is not None and scope.seen.drawn_in_half
        # Parameters of a subclass may be others.
        if draws_again and is_plain and ACTIVE.value is None:
            return special_calls.with_params_of(out, run(with_class(self, bare), *args, **kwargs))
        return out

    return governed_run


@contextlib.contextmanager
def _active(module: Any, check_all: bool, variables: Any = None) -> Iterator[Scope | None]:
    """Makes the module's policy active, unless it is so for this very module already; yields its scope."""
    own, base = getattr(module, RULES), _base(module)
    rules = in_trial(own)
    if _is_active(module, rules, base):
        yield None
        return
    location = None if module.scope is None else running_location()
    # Flax makes a submodule anew in every run, so what was checked is remembered on its class. Later runs
    # may leave modules out (dropout in evaluation) without its being an error.
    checked: Any = module if module.scope is None else type(module)
    with pushed(Scope(rules, root_path=base, location=location, model=weakref.ref(checked))) as scope:
        yield scope
    if rules.overrides and rules is own and CHECKED not in module.__dict__ and CHECKED not in vars(checked):
        check_used(module, rules, scope, check_all, variables)
        if module.scope is not None:
            setattr(type(module), CHECKED, True)
        module.__dict__[CHECKED] = True


def _base(module: nn.Module) -> tuple[str, ...]:
    """The path from which the module's rules count."""
    if _BASE in module.__dict__:
        return module.__dict__[_BASE]
    return () if module.scope is None else locate(module, running_location()).path


def _is_active(module: nn.Module, rules: PolicyMap, base: tuple[str, ...]) -> bool:
    outer = ACTIVE.value
    if outer is None or outer.rules != rules or outer.root_path != base:
        return False
    return module.scope is not None or outer.location is None


def _getattribute(bare: type[nn.Module]) -> Callable[..., Any]:
    """Submodules of a bound module (`model.bind(variables).encoder`) come out under its policy too."""

    def getattribute(self: Any, name: str) -> Any:
        if name.startswith("_") or name in ("parent", "scope"):
            return bare.__getattribute__(self, name)
        try:
            value = bare.__getattribute__(self, name)
        except AttributeError:
            value = bare.__getattr__(self, name)  # Runs setup.
        if not _holds_modules(value):
            return value
        rules = getattr(type(self), RULES, None)
        if self.scope is None or rules is None or _is_active(self, rules, _base(self)):
            return value
        return jax.tree.map(functools.partial(_under, rules, _base(self)), value)

    return getattribute


def _holds_modules(value: Any) -> bool:
    if isinstance(value, list | tuple | Mapping):
        return any(isinstance(part, nn.Module) for part in jax.tree.leaves(value))
    return isinstance(value, nn.Module)


def _under(rules: PolicyMap, base: tuple[str, ...], value: Any) -> Any:
    if not isinstance(value, nn.Module) or value.scope is None or hasattr(type(value), RULES):
        return value
    view = _view(value, wrapped_class(type(value), rules))
    view.__dict__.update({_BASE: base, CHECKED: True})
    return view


def _repr(bare: type[nn.Module]) -> Callable[[Any], str]:
    def show(self: Any) -> str:
        rules = getattr(self, RULES)
        return f"wrap({bare.__repr__(self)}, {rules if rules.overrides else repr(str(rules.default))})"

    return show


def _reduce(self: Any) -> Any:
    cls = bare_class(self)
    if cls is type(self):
        return object.__new__, (cls,), self.__getstate__()
    return wrap, (with_class(self, cls), getattr(self, RULES))
