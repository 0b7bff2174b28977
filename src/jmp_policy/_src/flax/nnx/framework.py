"""What else is done with NNX modules: cast parameters, tell a policy, wrap a part of a larger model.

And `Framework`, by which the rooms below Flax, and Linen, ask for it.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from jmp_policy._src.core.dtypes import cast_floating, is_half
from jmp_policy._src.flax.nnx import graph_nodes, layers, plan_errors, precision_plan, stored_arrays
from jmp_policy._src.flax.nnx.wrap_module import carried_out, rules_of, wrap
from jmp_policy._src.policy.frameworks import Framework
from jmp_policy._src.policy.patterns import path_text
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import PolicyMap, PolicyMapLike
from jmp_policy._src.policy.scope import in_trial

M = TypeVar("M", bound=nnx.Module)


def cast_params(module: M, policy: PolicyMapLike) -> M:
    """Casts the parameters of an NNX model to the param dtype of a policy, in place.

    Args:
      module: a bare or wrapped module. Only floating `nnx.Param`s are cast; normalisation layers that
        are float32 islands, and layers of fewer than 8 features, keep at least float32.
      policy: as for `wrap`.

    Returns:
      The module itself.

    Raises:
      TypeError, ValueError: as `wrap` does, before anything is changed.

    Example:
      >>> from flax import nnx
      >>> model = cast_params(nnx.Linear(8, 2, rngs=nnx.Rngs(0)), "bfloat16")
      >>> model.kernel.dtype
      dtype(bfloat16)
    """
    plan = precision_plan.make(module, policy, ())
    plan_errors.check_used(plan)
    _cast(plan)
    return module


def _cast(plan: precision_plan.Plan) -> None:
    """Casts the parameters to param dtype: all of them, or none where a cast fails."""
    new = [
        (variable, cast_floating(stored_arrays.read(variable), precision.param_dtype))
        for _, variable, precision in plan.wrong_params()
    ]
    for variable, value in new:
        stored_arrays.write(variable, value)


def wrap_part(module: M, rules: PolicyMap) -> tuple[M, list[tuple[graph_nodes.Path, Any]]]:
    """Wraps an NNX module inside a larger model, whose owner checks that its rules match.

    Its parameters are cast to param dtype. The second result tells what the rules were asked about.

    Example:
      >>> from flax import nnx
      >>> from jmp_policy import PolicyMap
      >>> part, met = wrap_part(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), PolicyMap("mixed_float16"))
      >>> [type(module).__name__ for _, module in met]
      ['Linear']
    """
    plan = precision_plan.make(module, rules, ())
    _cast(plan)
    return carried_out(plan), plan.met


def policy_of(module: Any) -> Policy | None:
    """The policy that a wrapped module computes under.

    None for bare modules, and for layers of Flax that follow their policy by settings alone: they are what
    somebody could have written by hand.

    Example:
      >>> from flax import nnx
      >>> from jmp_policy.nnx import wrap
      >>> model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
      >>> policy_of(wrap(model, "mixed_float16")), policy_of(model)
      (Policy('params=float32,compute=float16,output=float32'), None)
    """
    spec = graph_nodes.specification(module)
    return None if spec is None else spec.precision.policy


def _in_trial(node: Any) -> Callable[[Any], Any] | None:
    """What makes of a copy of a wrapped model one that follows the rules of a trial; None for other nodes."""
    rules = rules_of(node)
    if rules is None:
        return None

    def under_trial(model: Any) -> Any:
        tried, spec = in_trial(rules), graph_nodes.own_specification(model)
        if tried is rules:
            return model
        for (_, old), (_, new) in zip(graph_nodes.walk(node), graph_nodes.walk(model), strict=True):
            if isinstance(old, nnx.Module) and "dtype" in vars(old):
                layers.remember_own_dtype(new, layers.own_dtype(old), vars(new)["dtype"])
        return carried_out(precision_plan.make(model, tried, spec.methods if spec else ()))

    return under_trial


class NNXFramework(Framework):
    """NNX's answers to what the rooms below Flax ask of a framework; its modules hold their arrays."""

    holds_arrays = True
    products = (*layers.HAVE_PRODUCTS, nnx.Einsum, nnx.MultiHeadAttention)

    def wrap(self, module: Any, policy: Any) -> Any:
        """Puts a module under a policy."""
        return wrap(module, policy)

    def has_half_params(self, module: Any) -> bool:
        """Whether a Param of a module has 16 bits or fewer."""
        params = (v for _, v in graph_nodes.variables(module) if isinstance(v, nnx.Param))
        return any(is_half(dtype) for param in params for dtype in graph_nodes.dtypes(param))

    def wrap_part(self, module: Any, rules: Any) -> tuple[Any, Sequence[tuple[str, Any]]]:
        """Wraps a module inside a Linen model, whose parameters are cast to param dtype."""
        new, met = wrap_part(module, rules)
        return new, [(path_text(path), part) for path, part in met]

    def split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Splits modules and Variables among arguments from their arrays; None where there are none."""
        leaves = jax.tree.leaves((tuple(args), kwargs), is_leaf=graph_nodes.is_node)
        if not any(map(graph_nodes.is_node, leaves)):
            return None
        from jmp_policy._src.flax.nnx.states import Split

        return Split(args, kwargs, _in_trial)

    def naming(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager in which modules that `nnx.merge` makes name scopes."""
        from jmp_policy._src.flax.nnx.states import naming_merged

        def trial_of(node: Any) -> Callable[[Any], Any] | None:
            rules = rules_of(node)  # What dtypes the layers were made with, which some keep, is forgotten.
            return None if rules is None or rules.keep_module_dtypes else _in_trial(node)

        return naming_merged(trial_of)


FRAMEWORK = NNXFramework()
