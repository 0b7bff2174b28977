"""`autocast` for functions that take NNX modules: split, autocast, merge; updates of state are kept.

A trace of an NNX model says nothing of its modules. Here every module, for the length of the trace, is of a
subclass whose methods name a scope, so that path rules find it and profiles show it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from flax import nnx

from jmp_policy import _autocast
from jmp_policy._regions import region
from jmp_policy._rules import PolicyMap, PolicyMapLike, path_text, unused_error
from jmp_policy.nnx import _face, _governed, _graph, _plan

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a module is in the model it came with.

    Args:
      names: of the model's class and of the attributes on the way to the module.
      precision: what its operations are marked with; None where no rules are.
    """

    names: tuple[str, ...] = ()
    precision: str | None = None


_HERE: contextvars.ContextVar[_Place | None] = contextvars.ContextVar("running module", default=None)


def autocast(fn: F, policy: PolicyMapLike, **options: Any) -> F:
    """`jmp_policy.autocast` of a function that takes NNX modules.

    Stands where the function stands, under `nnx.jit` and inside `nnx.value_and_grad` or
    `jmp_policy.nnx.scaled_value_and_grad`. What the function changes in its modules (batch statistics,
    caches, counts of random streams) is changed in them afterwards, in the dtypes it had. Modules are scopes
    for `rules=`: "Net/layers/0/linear".

    Args:
      fn: a function of modules, other NNX nodes (`nnx.Rngs`) and whatever `jmp_policy.autocast` takes.
      policy: a half dtype, a policy or its text, or a `PolicyMap`, whose rules mean what they mean to `wrap`.
      options: as `jmp_policy.autocast` takes them: `rules`, `lower`, `full`, `follow`, `ops`.

    Returns:
      A function with the same signature, output structure and output dtypes.

    Raises:
      TypeError, ValueError: as `jmp_policy.autocast`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
      >>> half = autocast(lambda model, x: model(x).sum(), "float16")
      >>> loss, grads = nnx.value_and_grad(half)(model, jnp.ones((2, 4)))
      >>> loss.dtype, grads.layers[0].kernel.dtype
      (dtype('float32'), dtype('float32'))
    """
    pure, default = _checked(fn, policy, "autocast")
    cast = _autocast.autocast(pure, default, **options)

    @functools.wraps(fn)
    def in_half(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(pure):
            nodes, states = _split(pure, args, kwargs)
            values, changed, out, out_structure = cast(*states)
            out_nodes: Any = ()
            if changed is not None:
                with nnx.merge_context(pure, inner=False) as context:
                    _, out_nodes = context.merge(*changed)
        if changed is None:
            _write_changed(nodes, values)
        return _filled(out_structure, out, out_nodes)

    return in_half  # type: ignore[return-value]


def explain(
    fn: Callable[..., Any], policy: PolicyMapLike, **options: Any
) -> Callable[..., _autocast.Explanation]:
    """What `autocast` would do with a function of NNX modules; `jmp_policy.explain` for them.

    Args:
      fn, policy, options: as `autocast` takes them.

    Returns:
      A function of the same arguments that traces `fn`, changes nothing and returns an `Explanation`.

    Raises:
      TypeError, ValueError: as `autocast`.
    """
    pure, default = _checked(fn, policy, "explain")
    explained = _autocast.explain(pure, default, **options)

    @functools.wraps(fn)
    def of_arguments(*args: Any, **kwargs: Any) -> _autocast.Explanation:
        with nnx.update_context(pure):
            return explained(*_split(pure, args, kwargs)[1])

    return of_arguments


def _checked(fn: Callable[..., Any], policy: Any, name: str) -> "tuple[_Pure, PolicyMap]":
    if isinstance(fn, nnx.Module) or not callable(fn):
        raise TypeError(
            f"nnx.{name} takes a function of modules, got {type(fn).__name__}. For a module give it "
            "`lambda model, x: model(x)`."
        )
    rules = _autocast.autocast_policy(policy)
    # Which policy governs a module is marked by the module itself.
    return _Pure(fn, rules), PolicyMap(rules.default)


def _split(pure: "_Pure", args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The nodes among the arguments, and the arguments of the pure function."""
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    nodes = tuple(leaf for leaf in leaves if _is_node(leaf))
    others = [_NODE if _is_node(leaf) else leaf for leaf in leaves]
    with nnx.split_context(pure) as context:
        graph, state = context.split(nodes)
    return nodes, (structure, graph, state, others)


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _filled(structure: Any, leaves: Any, nodes: Any) -> Any:
    """The tree, with the nodes in the places that were left for them."""
    given = iter(nodes)
    return jax.tree.unflatten(structure, [next(given) if leaf is _NODE else leaf for leaf in leaves])


class _Gap:
    """Stands for a node."""


_NODE = _Gap()


class _Pure:
    """The function of states that a function of modules is."""

    def __init__(self, fn: Callable[..., Any], rules: PolicyMap):
        self._fn, self._rules = fn, rules
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, structure: Any, graph: Any, state: Any, others: Any) -> Any:
        with nnx.merge_context(self, inner=True) as context:
            nodes = context.merge(graph, state)
        before = nnx.graphdef(nodes)
        whole = _filled(structure, others, nodes)
        args, kwargs = whole
        with _named(nodes, self._rules):
            out = self._fn(*args, **kwargs)
        leaves, out_structure = jax.tree.flatten(out, is_leaf=_is_node)
        out_nodes = tuple(leaf for leaf in leaves if _is_node(leaf))
        values, changed = [_graph.read(variable) for variable in _variables(nodes)], None
        if out_nodes or nnx.graphdef(nodes) != before:
            values = []
            with nnx.split_context(self) as context:
                changed = context.split((nodes, out_nodes))
        return values, changed, [_NODE if _is_node(leaf) else leaf for leaf in leaves], out_structure


def _variables(nodes: Any) -> Iterator[nnx.Variable]:
    for node in nodes:
        if isinstance(node, nnx.Variable):
            yield node
        else:
            yield from (variable for _, variable in _graph.variables(node))


def _write_changed(nodes: Any, values: Any) -> None:
    """Writes what a call has changed, and nothing else: parameters may be of a trace closed to writing."""
    for variable, value in zip(_variables(nodes), values, strict=True):
        old, new = jax.tree.leaves(_graph.read(variable)), jax.tree.leaves(value)
        if len(old) != len(new) or any(x is not y for x, y in zip(old, new, strict=True)):
            _graph.write(variable, value)


@contextlib.contextmanager
def _named(nodes: Any, rules: PolicyMap) -> Iterator[None]:
    """Lets the modules name scopes, and mark their operations where rules govern them."""
    classes: list[tuple[Any, type]] = []
    seen: list[Any] = []
    try:
        for node in nodes:
            if not isinstance(node, nnx.Module):
                continue
            places, met = _plan.resolved(node, rules)
            seen += met
            for place in places.values():
                module: Any = place.module
                if any(module is other for other, _ in classes):
                    continue  # Handed in twice.
                precision = place.treatment.policy.compute_dtype.name if rules.overrides else None
                names = (_plan.name_of(node), *map(str, place.path))
                classes.append((module, type(module)))
                object.__setattr__(module, "__class__", _scoped_class(type(module), _Place(names, precision)))
        if unused := rules.unused(seen):
            paths = [path_text(path) for path, _ in seen]
            raise unused_error(unused, "the function's models", paths)
        start = _Place((), rules.default.compute_dtype.name if rules.overrides else None)
        token = _HERE.set(start)
        try:
            yield
        finally:
            _HERE.reset(token)
    finally:
        for module, cls in reversed(classes):
            object.__setattr__(module, "__class__", cls)


@functools.lru_cache(maxsize=4096)
def _scoped_class(bare: type, place: _Place) -> type:
    """A subclass whose methods name a scope; the same one for the same place, so that caches hit."""
    namespace: dict[str, Any] = {
        "__module__": bare.__module__,
        "__qualname__": bare.__qualname__,
        "__doc__": bare.__doc__,
    }
    for name in _governed.own_methods(bare):
        method = inspect.getattr_static(bare, name)
        if inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
            namespace[name] = _scoped(method, place)
    with _face.CLASSES:
        return _face.subclass(bare, namespace)


def _scoped(method: Callable[..., Any], place: _Place) -> Callable[..., Any]:
    @functools.wraps(method)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        here = _HERE.get() or _Place()
        inside = place.names[: len(here.names)] == here.names
        below = place.names[len(here.names) :] if inside else place.names
        with contextlib.ExitStack() as stack:
            if below:
                stack.enter_context(jax.named_scope("/".join(below)))
            if place.precision != here.precision and place.precision is not None:
                stack.enter_context(region(place.precision))
            token = _HERE.set(place)
            stack.callback(_HERE.reset, token)
            return method(*args, **kwargs)

    return scoped
