"""`autocast` for functions that take NNX modules: split, autocast, merge; updates of state are kept."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from jmp_policy import _autocast
from jmp_policy._rules import PolicyMap, PolicyMapLike
from jmp_policy.nnx import _graph
from jmp_policy.nnx._graph import is_node
from jmp_policy.nnx._named import named
from jmp_policy.nnx._pure import NODE, filled, variables

F = TypeVar("F", bound=Callable[..., Any])


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
        return filled(out_structure, out, out_nodes)

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
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    nodes = tuple(leaf for leaf in leaves if is_node(leaf))
    others = [NODE if is_node(leaf) else leaf for leaf in leaves]
    with nnx.split_context(pure) as context:
        graph, state = context.split(nodes)
    return nodes, (structure, graph, state, others)


class _Pure:
    """The function of states that a function of modules is."""

    def __init__(self, fn: Callable[..., Any], rules: PolicyMap):
        self._fn, self._rules = fn, rules
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, structure: Any, graph: Any, state: Any, others: Any) -> Any:
        with nnx.merge_context(self, inner=True) as context:
            nodes = context.merge(graph, state)
        before = nnx.graphdef(nodes)
        whole = filled(structure, others, nodes)
        args, kwargs = whole
        with named(nodes, self._rules):
            out = self._fn(*args, **kwargs)
        leaves, out_structure = jax.tree.flatten(out, is_leaf=is_node)
        out_nodes = tuple(leaf for leaf in leaves if is_node(leaf))
        values, changed = [_graph.read(variable) for variable in variables(nodes)], None
        if out_nodes or nnx.graphdef(nodes) != before:
            values = []
            with nnx.split_context(self) as context:
                changed = context.split((nodes, out_nodes))
        return values, changed, [NODE if is_node(leaf) else leaf for leaf in leaves], out_structure


def _write_changed(nodes: Any, values: Any) -> None:
    """Writes what a call has changed, and nothing else: parameters may be of a trace closed to writing."""
    for variable, value in zip(variables(nodes), values, strict=True):
        old, new = jax.tree.leaves(_graph.read(variable)), jax.tree.leaves(value)
        if len(old) != len(new) or any(x is not y for x, y in zip(old, new, strict=True)):
            _graph.write(variable, value)
