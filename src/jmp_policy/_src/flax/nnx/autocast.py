"""`autocast` for functions that take NNX modules: split, autocast, merge; updates of state are kept."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from jmp_policy._src.autocast import api, explanation
from jmp_policy._src.flax.nnx.graph_nodes import is_node
from jmp_policy._src.flax.nnx.states import Pure, named, transformed
from jmp_policy._src.policy.rules import PolicyMap, PolicyMapLike
from jmp_policy._src.policy.scope import in_trial

F = TypeVar("F", bound=Callable[..., Any])


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
        with named(nodes, in_trial(rules)):
            return fn(*args, **kwargs)

    return named_fn, rules  # type: ignore[return-value]
