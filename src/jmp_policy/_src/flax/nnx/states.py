"""Functions of NNX modules, as functions of arrays: what tracing takes, and what `autocast` transforms.

A transformation of functions of arrays (`autocast`, float32 gradients) is given a function of states, and
what that changes is written to the modules afterwards::

    def of_modules(model, x):
        graph, state = nnx.split(model)
        out, changed = transform(of_states)(state, x)   # of_states merges a model, calls it, and splits it
        nnx.update(model, changed)
        return out

A trace of an NNX model says nothing of its modules. With `named` every module, for the length of the trace,
is of a subclass whose methods name a scope, so that path rules find it, and profiles and reports show it.
"""

import contextlib
import contextvars
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx

from jmp_policy._src.autocast import api, explanation
from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.flax.nnx import graph_nodes, precision_plan, stored_arrays
from jmp_policy._src.flax.nnx.governed_calls import CLASSES, subclass
from jmp_policy._src.flax.nnx.graph_nodes import is_node, key_of
from jmp_policy._src.policy.frameworks import current_watcher, returned
from jmp_policy._src.policy.patterns import path_text, unused_error
from jmp_policy._src.policy.regions import region
from jmp_policy._src.policy.rules import PolicyMap, PolicyMapLike
from jmp_policy._src.policy.scope import OF_REPORT, TRIAL, in_trial

F = TypeVar("F", bound=Callable[..., Any])

#: Stands for a node.
_NODE = object()


def _filled(structure: Any, leaves: Any, nodes: Any) -> Any:
    """The tree, with the nodes where they were left out."""
    given = iter(nodes)
    return jax.tree.unflatten(structure, [next(given) if leaf is _NODE else leaf for leaf in leaves])


def _taken_apart(tree: Any) -> tuple[Any, list[Any], tuple[Any, ...]]:
    """What `_filled` puts together: structure, leaves with `_NODE` where there are nodes, the nodes."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_node)
    nodes = tuple(leaf for leaf in leaves if is_node(leaf))
    return structure, [_NODE if is_node(leaf) else leaf for leaf in leaves], nodes


def _variables(nodes: Any) -> Iterator[nnx.Variable]:
    """Every Variable of these nodes, once per node."""
    return (variable for node in nodes for _, variable in graph_nodes.variables(node))


def transformed(fn: Callable[..., Any], transform: Callable[..., Any]) -> Callable[..., Any]:
    """The function of modules that a transformation makes of a function of modules.

    Args:
      fn: a function of modules, other nodes and anything else.
      transform: takes a function of pytrees without nodes to another one with the same arguments and results.
    """
    pure = Pure(fn)
    new = transform(pure)

    @functools.wraps(fn)
    def of_modules(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(pure):
            nodes, states = pure.split(args, kwargs)
            values, changed, out, out_structure = new(*states)
            out_nodes: Any = ()
            if changed is not None:
                with nnx.merge_context(pure, inner=False) as context:
                    _, out_nodes = context.merge(*changed)
        if changed is None:
            _write_changed(nodes, values)
        return _filled(out_structure, out, out_nodes)

    return of_modules


class Pure:
    """A function of modules, as one of states."""

    def __init__(self, fn: Callable[..., Any]):
        self._fn = fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def split(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The nodes among the arguments, and the arguments of this function."""
        structure, others, nodes = _taken_apart((args, kwargs))
        with nnx.split_context(self) as context:
            graph, state = context.split(nodes)
        return nodes, (structure, graph, state, others)

    def __call__(self, structure: Any, graph: Any, state: Any, others: Any) -> Any:
        with nnx.merge_context(self, inner=True) as context:
            nodes = context.merge(graph, state)
        before = nnx.graphdef(nodes)
        args, kwargs = _filled(structure, others, nodes)
        out = self._fn(*args, **kwargs)
        out_structure, others, out_nodes = _taken_apart(out)
        values, changed = [stored_arrays.read(variable) for variable in _variables(nodes)], None
        # Also where nothing is split: until then the context keeps the nodes, and so the tracers.
        with nnx.split_context(self) as context:
            if out_nodes or nnx.graphdef(nodes) != before:
                values, changed = [], context.split((nodes, out_nodes))
        return values, changed, others, out_structure


def _write_changed(nodes: Any, values: Any) -> None:
    """Writes what a call has changed, and nothing else: parameters may be of a trace closed to writing."""
    for variable, value in zip(_variables(nodes), values, strict=True):
        old, new = jax.tree.leaves(stored_arrays.read(variable)), jax.tree.leaves(value)
        if len(old) != len(new) or any(x is not y for x, y in zip(old, new, strict=True)):
            stored_arrays.write(variable, value)


class Split:
    """The arguments of a function, with the nodes among them as states.

    Args:
      args, kwargs: what the function of modules takes.
      trial_of: gives for a node what makes of its copies those that follow the rules of a trial, or None.

    Attributes:
      state: a pytree of the arrays of all nodes; each Variable's once, however often it is shared.
      others: the other arguments, with gaps for the nodes; structured as `structure` says.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], trial_of: Callable[[Any], Any]):
        self.structure, self.others, nodes = _taken_apart((tuple(args), kwargs))
        self._graph, self.state = nnx.split(nodes)
        self._in_trial = list(map(trial_of, nodes))
        whole = jax.tree.unflatten(self.structure, self.others)
        self._gaps = [path for path, leaf in jax.tree_util.tree_leaves_with_path(whole) if leaf is _NODE]

    def call(self, fn: Callable[..., Any], state: Any, others: Any, names: Sequence[str]) -> Any:
        """The function's result with new nodes of a state, and the values of their Variables afterwards.

        The values by their paths, which start with the names of positional arguments.
        """
        nodes = nnx.merge(self._graph, state)
        pairs = zip(nodes, self._in_trial, strict=True)
        called = [node if under_trial is None else under_trial(node) for node, under_trial in pairs]
        args, kwargs = _filled(self.structure, others, called)
        with contextlib.ExitStack() as stack:
            stack.enter_context(named(called, PolicyMap("float32")))
            if any(self._in_trial):
                stack.enter_context(TRIAL(None))  # Their parts of Linen have those rules already.
            out = fn(*args, **kwargs)
        out = jax.tree.map(_values, out, is_leaf=is_node)
        starts = map(functools.partial(self._start, names=names), range(len(nodes)))
        return out, {
            path_text((*start, *path)): stored_arrays.read(variable)
            for start, node in zip(starts, nodes, strict=True)
            for path, variable in graph_nodes.variables(node)
        }

    def _start(self, gap: int, names: Sequence[str]) -> tuple[Any, ...]:
        """The path of a node among the arguments."""
        which, position, *above = map(key_of, self._gaps[gap])
        return (names[position] if which == 0 else position, *above)

    def describe(self, names: Sequence[str]) -> Iterator[tuple[str, int | str, bool]]:
        """For each array of the state: its path, its argument, and whether it is trainable.

        Args:
          names: of the positional arguments.
        """
        for path, variable in jax.tree_util.tree_leaves_with_path(self.state, is_leaf=is_node):
            gap, *keys = map(key_of, path)
            start, position = self._start(int(gap), names), key_of(self._gaps[int(gap)][1])
            for below, array in jax.tree_util.tree_leaves_with_path(variable):
                trains = isinstance(variable, nnx.Param) and is_floating(array.dtype)
                yield path_text((*start, *keys, *map(key_of, below[1:]))), position, trains


def _values(leaf: Any) -> Any:
    if isinstance(leaf, nnx.Variable):
        return stored_arrays.read(leaf)
    return jax.tree.map(_values, nnx.state(leaf), is_leaf=is_node) if is_node(leaf) else leaf


class _Scope(NamedTuple):
    """The scope that the methods of a module name.

    Args:
      names: of the model's class and of the attributes on the way to the module.
      marked_as: what its operations are marked with; None where no rules are.
    """

    names: tuple[str, ...] = ()
    marked_as: str | None = None


_HERE: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("running module", default=None)


@contextlib.contextmanager
def named(nodes: Any, rules: PolicyMap, *, is_trial: bool = False) -> Iterator[None]:
    """Lets the modules name scopes, and mark their operations where rules govern them.

    Rules of a trial may be meant for modules elsewhere.
    """
    with contextlib.ExitStack() as stack:
        unused, met = _name_scopes(nodes, rules, stack)
        if unused and not is_trial:
            raise unused_error(unused, "the function's models", [path_text(path) for path, _ in met])
        token = _HERE.set(_Scope((), rules.default.compute_dtype.name if rules.overrides else None))
        stack.callback(_HERE.reset, token)
        yield


def _name_scopes(nodes: Any, rules: PolicyMap, stack: contextlib.ExitStack) -> tuple[Any, list[Any]]:
    """Lets modules name scopes until a stack ends; gives the rules that match none, and what they met."""
    seen: list[Any] = []
    met: list[Any] = []
    for node in nodes:
        if not isinstance(node, nnx.Module):
            continue
        plan = precision_plan.Plan(node, rules)
        met += plan.met
        for planned in plan.modules.values():
            module = planned.module
            if any(module is other for other in seen):
                continue  # Handed in twice.
            seen.append(module)
            marked_as = planned.precision.policy.compute_dtype.name if rules.overrides else None
            scope = _Scope((graph_nodes.name_of(node), *map(str, planned.path)), marked_as)
            stack.callback(object.__setattr__, module, "__class__", type(module))
            object.__setattr__(module, "__class__", _scoped_class(type(module), scope))
    return rules.unused(met), met


#: What is done, in this thread, with the models that `nnx.merge` makes.
_ON_MERGE: contextvars.ContextVar[Any] = contextvars.ContextVar("on merge", default=None)

#: Flax's own `nnx.merge`, once for each with-block of `_on_merge` that has not ended.
_OWN_MERGE: list[Any] = []

_LOCK = threading.Lock()


@contextlib.contextmanager
def _on_merge(change: Callable[[Any], Any]) -> Iterator[None]:
    """Lets a function replace what `nnx.merge` makes in this thread, for the length of a with-block.

    Flax has no hook for it: `nnx.merge` is another function until the last with-block of all threads ends.

    Args:
      change: takes the nodes that were made, and gives those to go on with.
    """
    with _LOCK:
        _OWN_MERGE.append(_OWN_MERGE[0] if _OWN_MERGE else nnx.merge)
        nnx.merge = nnx.graphlib.merge = _changed_merge(_OWN_MERGE[0])
    token = _ON_MERGE.set(change)
    try:
        yield
    finally:
        _ON_MERGE.reset(token)
        with _LOCK:
            own = _OWN_MERGE.pop()
            if not _OWN_MERGE:
                nnx.merge = nnx.graphlib.merge = own


@functools.cache
def _changed_merge(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def merge(*args: Any, **kwargs: Any) -> Any:
        nodes, change = own(*args, **kwargs), _ON_MERGE.get()
        if change is None:
            return nodes
        token = _ON_MERGE.set(None)  # A change may merge for itself.
        try:
            return change(nodes)
        finally:
            _ON_MERGE.reset(token)

    return merge


@contextlib.contextmanager
def naming_merged(trial_of: Callable[[Any], Any]) -> Iterator[None]:
    """Lets the modules that `nnx.merge` makes in a with-block name scopes, and follow the rules of a trial.

    Args:
      trial_of: gives for a node that was merged what makes of it one that follows those rules, or None.
    """

    def under_trial(node: Any) -> Any:
        change = trial_of(node) if isinstance(node, nnx.Module) else None
        return node if change is None else change(node)

    with contextlib.ExitStack() as stack:

        def change(merged: Any) -> Any:
            merged = jax.tree.map(under_trial, merged, is_leaf=is_node)
            _name_scopes(jax.tree.leaves(merged, is_leaf=is_node), PolicyMap("float32"), stack)
            return merged

        stack.enter_context(_on_merge(change))
        stack.enter_context(OF_REPORT(True))  # Who merges is traced again, with the names of modules.
        yield


@functools.lru_cache(maxsize=4096)
def _scoped_class(bare: type, scope: _Scope) -> type:
    """A stand-in whose methods name a scope; the same one for the same scope, so that caches of jit hit."""
    names = {name for name in graph_nodes.own_methods(bare) if not name.startswith("_")}

    def getattribute(self: Any, name: str) -> Any:
        value = bare.__getattribute__(self, name)  # type: ignore[call-arg]
        if name not in names or not isinstance(value, types.MethodType) or value.__self__ is not self:
            return value
        if _HERE.get() == scope and current_watcher() is None:
            return value  # The scope is named already: a method that a module asks for is the author's.
        return types.MethodType(_scoped(value.__func__, f".{name}", scope), self)

    namespace: dict[str, Any] = {"__getattribute__": getattribute}
    if "__call__" in graph_nodes.own_methods(bare):
        namespace["__call__"] = _scoped(inspect.getattr_static(bare, "__call__"), "", scope)
    with CLASSES:
        return subclass(bare, namespace)


@functools.lru_cache(maxsize=4096)
def _scoped(method: Callable[..., Any], suffix: str, scope: _Scope) -> Callable[..., Any]:
    @functools.wraps(method)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        here = _HERE.get() or _Scope()
        # A shared module may be called from elsewhere: what both places have in common is named already.
        both = zip(scope.names, here.names, strict=False)
        below = scope.names[len(list(itertools.takewhile(lambda names: names[0] == names[1], both))) :]
        with contextlib.ExitStack() as stack:
            if below:
                stack.enter_context(jax.named_scope("/".join(below)))
            if scope.marked_as != here.marked_as and scope.marked_as is not None:
                stack.enter_context(region(scope.marked_as))
            token = _HERE.set(scope)
            stack.callback(_HERE.reset, token)
            out = method(*args, **kwargs)
        return returned("/".join(scope.names) + suffix, args[0], args[1:], kwargs, out)

    return scoped


def autocast(fn: F, policy: "PolicyMapLike | None" = None, **options: Any) -> F:
    """Returns `jmp_policy.autocast` of a function that takes NNX modules.

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
    named_fn, rules = _checked(fn, policy, options, "autocast")
    settings = api.Settings(PolicyMap(rules.default), marked_by=rules, **options)
    return transformed(named_fn, lambda pure: api.lowered(pure, settings))  # type: ignore[return-value]


def explain(
    fn: Callable[..., Any], policy: "PolicyMapLike | None" = None, **options: Any
) -> Callable[..., explanation.Explanation]:
    """Shows what `autocast` would do with a function of NNX modules.

    Args:
      fn, policy, options: as `autocast` takes them.

    Returns:
      A function of the same arguments that traces `fn`, changes nothing and returns an `Explanation`.

    Raises:
      TypeError, ValueError: as `autocast`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
      >>> found = explain(lambda model, x: model(x), "float16")(model, jnp.ones((1, 8)))
      >>> found.of("dot_general")[0].operands
      'float16'
    """
    named_fn, rules = _checked(fn, policy, options, "explain")
    pure = Pure(named_fn)
    explained = explanation.explain(pure, PolicyMap(rules.default), **options)

    @functools.wraps(fn)
    def of_arguments(*args: Any, **kwargs: Any) -> explanation.Explanation:
        with nnx.update_context(pure):
            return explained(*pure.split(args, kwargs)[1])

    return of_arguments


def _checked(fn: F, policy: Any, options: dict[str, Any], name: str) -> tuple[F, PolicyMap]:
    """The function with modules that name scopes and mark their policy, and the rules.

    Those have the recipe that was given as `lower`, which is taken from there.
    """
    recipe, options["lower"] = api.taken_recipe(options.get("lower", ()))
    if isinstance(fn, nnx.Module) or not callable(fn):
        raise TypeError(
            f"nnx.{name} takes a function of modules, got {type(fn).__name__}. For a module give it "
            "`lambda model, x: model(x)`."
        )
    rules = api.autocast_policy(policy, recipe)

    @functools.wraps(fn)
    def named_fn(*args: Any, **kwargs: Any) -> Any:
        nodes = [leaf for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_node) if is_node(leaf)]
        current = in_trial(rules)
        with named(nodes, current, is_trial=current is not rules):
            return fn(*args, **kwargs)

    return named_fn, rules  # type: ignore[return-value]
