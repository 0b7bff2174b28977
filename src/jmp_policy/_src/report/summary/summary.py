"""Summarises a model under a policy: which rule governs each module, and the dtypes of its values."""

from collections.abc import Callable, Sequence
from typing import Any

from jmp_policy._src.autocast.api import autocast_policy
from jmp_policy._src.autocast.explanation import explain
from jmp_policy._src.core.classes import is_instance_of
from jmp_policy._src.policy.frameworks import framework_of
from jmp_policy._src.policy.patterns import show_pattern
from jmp_policy._src.report.summary.rows import ModuleRow, Summary


def summary(model: Any, policy: Any = None, *inputs: Any, **kwargs: Any) -> Summary:
    """Lists, per module, which rule governs it, and the dtypes of its parameters, computation and output.

    The model is traced, and nothing runs: inputs may be `jax.ShapeDtypeStruct`s.

    Args:
      model: a Linen or NNX module, bare or wrapped; or any function, whose named scopes are its rows.
      policy: a `PolicyMap`, a policy or its text. None for a wrapped Linen module: the policy that it has.
      inputs, kwargs: arguments of the model's call. Those that are not arrays are static.

    Returns:
      A `Summary`; `print` shows it.

    Raises:
      TypeError, ValueError: for something that is not a model or policy, and for rules that match nothing.

    Example:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> model = nn.Sequential([nn.Dense(4), nn.LayerNorm()])
      >>> found = summary(model, "mixed_float16", jnp.ones((1, 3)))
      >>> [(row.type, row.rule, row.returns) for row in found.modules[1:]]
      [('Dense', 'default', ('float16',)), ('LayerNorm', 'float32 island', ('float16',))]
    """
    if isinstance(model, type):
        raise TypeError(f"summary takes a module, not its class: summary({model.__name__}(...), ...).")
    if framework_of(model) is not None:
        if is_instance_of(model, "flax.linen", "Module"):
            from jmp_policy._src.report.summary.of_linen import summary_of
        else:
            from jmp_policy._src.report.summary.of_nnx import summary_of
        return summary_of(model, policy, inputs, kwargs)
    if not callable(model):
        raise TypeError(f"summary takes a module or a function, got {model!r:.200}.")
    return _of_function(model, policy, inputs, kwargs)


def _of_function(
    fn: Callable[..., Any], policy: Any, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Summary:
    """Summarises a function by its named scopes, in the precision that autocast gives them."""
    rules = autocast_policy(policy)
    operations = explain(fn, policy)(*inputs, **kwargs).operations
    paths: dict[str, list[Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, []).append(operation)
    rows = []
    for path, inside in paths.items():
        names = path.split("/") if path else []
        above = ("/".join(names[:depth]) for depth in range(len(names), -1, -1))
        index = next((i for i in map(rules.match, above) if i is not None), None)
        chosen = rules.overrides[index][1] if index is not None else rules.default
        rows.append(
            ModuleRow(
                path=path,
                type="scope" if path else getattr(fn, "__name__", "function"),
                rule="default" if index is None else show_pattern(rules.overrides[index][0]),
                # Autocast does not cast arguments and results.
                param_dtype="-",
                compute_dtype=chosen.compute_dtype.name,
                output_dtype="-",
                parameters=0,
                bytes=0,
                receives=tuple(filter(None, inside[0].operands.split(", "))),
                returns=tuple(filter(None, inside[-1].chosen.split(", "))),
                calls=1,
                note=f"{len(inside)} operations",
            )
        )
    name = getattr(fn, "__name__", "function")
    missed = tuple(r.path for r in rows if r.rule == "default" and r.path) if rules.overrides else ()
    return Summary(name, str(policy), tuple(rows), 0, 0, 0, no_rule=missed)
