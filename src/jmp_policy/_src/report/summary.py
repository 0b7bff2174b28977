"""Summarises a model under a policy: which rule governs each module, and the dtypes of its values."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.autocast.api import autocast_policy
from jmp_policy._src.autocast.explanation import explain
from jmp_policy._src.core.classes import is_instance_of
from jmp_policy._src.core.report_base import Report, Sum, Table, bytes_text, count_text, joined, row_of
from jmp_policy._src.jaxpr.walk import Walk
from jmp_policy._src.policy.frameworks import framework_of
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.patterns import show_pattern
from jmp_policy._src.policy.recipes import arithmetic_of, is_recipe
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.products.fp8.eligibility import stays_in_half


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """Row of a summary: one module under a policy.

    Args:
      path: the path that rules match: "decoder/layer_0"; "" for the model itself.
      type: name of its class.
      rule: the pattern of the rule that governs it, "default", or "float32 island" for a normalisation layer,
        which computes in float32 inside a half-precision model.
      param_dtype, compute_dtype, output_dtype: dtypes of its policy; the first is that of its parameters
        where it has some. "-" for the scopes of functions, whose arguments and results are not cast.
      parameters: number of its parameters, without those of modules below it.
      bytes: bytes of these parameters, as they are stored.
      receives, returns: dtypes of the floating arrays among its inputs and outputs; for a function's scope,
        those of its first and last operation.
      calls: how often it is called.
      note: a remark, or "".
      grad_dtype: dtype in which half-precision products return its weight gradients; None for the products'
        default.
    """

    path: str
    type: str
    rule: str
    param_dtype: str
    compute_dtype: str
    output_dtype: str
    parameters: int
    bytes: int
    receives: tuple[str, ...]
    returns: tuple[str, ...]
    calls: int
    note: str = ""
    grad_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Summary(Report):
    """Summary of a model under a policy; `str` is a table of its modules, with totals.

    Args:
      model: name of its class.
      policy: the policy as text.
      modules: one row per module, in the order of their first calls; for NNX in the order of attributes.
      parameters: number of all parameters.
      bytes: their bytes as they are stored.
      compute_bytes: their bytes in the dtypes in which they are used.
      no_rule: paths of modules that are under the default although there are rules.

    Example:
      >>> import flax.linen as nn, jax.numpy as jnp, jmp_policy
      >>> found = jmp_policy.summary(nn.Dense(2), "mixed_float16", jnp.ones((1, 8)))
      >>> found.parameters, found.bytes, found.compute_bytes
      (18, 72, 36)
    """

    model: str
    policy: str
    modules: tuple[ModuleRow, ...]
    parameters: int
    bytes: int
    compute_bytes: int
    no_rule: tuple[str, ...] = ()

    _rows = "modules"

    def __getitem__(self, path: str) -> ModuleRow:
        """The row of a module by its path."""
        return row_of(self.modules, path, "module")

    @property
    def verdict(self) -> str:
        """Totals, and modules without a rule, in a sentence or two."""
        count = f"{len(self.modules)} module{'s' * (len(self.modules) != 1)}"
        text = (
            f"{count}, {count_text(self.parameters)} parameters: "
            f"{bytes_text(self.bytes)} stored, {bytes_text(self.compute_bytes)} as used."
        )
        if all(row.param_dtype == "-" for row in self.modules):
            text = f"{count}: named scopes of a function, which has no parameters of its own."
        if self.no_rule:
            text += f" No rule reaches {joined(self.no_rule, 5, repr)}: the default governs."
        return text

    def _tables(self) -> Sequence[Table]:
        columns = ("module", "type", "rule", "p/c/o", "parameters ", "bytes ", "in -> out", "note")
        rows = [
            (
                *(row.path or "(model)", row.type, row.rule, _policy_text(row)),
                *(Sum(row.parameters, count_text), Sum(row.bytes, bytes_text)),
                *(f"{_short(row.receives)} -> {_short(row.returns)}".strip(), row.note),
            )
            for row in self.modules
        ]
        policy = self.policy if len(self.policy) < 60 else self.policy[:57] + "..."
        return [Table(columns, rows, f"{self.model} under {policy}", most=30)]

    def _lines(self) -> Sequence[str]:
        return [self.verdict]


def make_row(
    path: str,
    module: Any,
    rules: PolicyMap,
    index: int | None,
    precision: ModulePrecision,
    params: Sequence[Any],
    calls: Sequence[Any],
    own_dtype: Any,
    keeps_dtype: bool,
    notes: Sequence[str],
) -> ModuleRow:
    """Makes the row of a module.

    Args:
      path: as in the row.
      module: the class that the row shows.
      rules: those of the model.
      index: which of them governs the module; None for the default.
      precision: the module's precision under the policy.
      params: its parameters, without those of modules below it; arrays or their types.
      calls: its calls, as `tapping.Calls` recorded them.
      own_dtype: the dtype that the module itself asks for, or None.
      keeps_dtype: whether the rules leave it that.
      notes: remarks; "" for none.
    """
    policy = precision.policy
    rule = "default" if index is None else show_pattern(rules.overrides[index][0])
    stored = {leaf.dtype.name for leaf in params}
    if own_dtype is not None and (keeps_dtype or own_dtype != policy.compute_dtype):
        own = f"its dtype={jnp.dtype(own_dtype).name} is {'kept' if keeps_dtype else 'overruled'}"
        notes = own, *notes
    return ModuleRow(
        path=path,
        type=module.__name__,
        rule=_ISLAND if precision.island else rule,
        param_dtype=", ".join(sorted(stored)) or policy.param_dtype.name,
        compute_dtype="float32" if precision.island else policy.compute_dtype.name,
        output_dtype=policy.output_dtype.name,
        parameters=sum(leaf.size for leaf in params),
        bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in params),
        receives=tuple(dict.fromkeys(dtype for call in calls for dtype in call.receives)),
        returns=tuple(dict.fromkeys(dtype for call in calls for dtype in call.returns)),
        calls=len(calls),
        note=", ".join(filter(None, notes)),
        grad_dtype=policy.grad_dtype and policy.grad_dtype.name,
    )


def _summary(name: str, policy: str, rules: PolicyMap, rows: Sequence[ModuleRow]) -> Summary:
    return Summary(
        model=name,
        policy=policy,
        modules=tuple(rows),
        parameters=sum(r.parameters for r in rows),
        bytes=sum(r.bytes for r in rows),
        compute_bytes=sum(r.parameters * jnp.dtype(r.compute_dtype).itemsize for r in rows),
        no_rule=tuple(r.path for r in rows if r.rule == "default" and r.path) if rules.overrides else (),
    )


def _noted(row: ModuleRow, reasons: Sequence[str]) -> ModuleRow:
    """A row with the reason in place of the recipe, if none of its products follows that.

    Args:
      row: the row.
      reasons: why products of the module are not in float8; "" for one that is.
    """
    if not all(reasons):
        return row
    words = row.note.split(", ")
    words = [f"not in {arithmetic_of(word)}: {reasons[0]}" if is_recipe(word) else word for word in words]
    return dataclasses.replace(row, note=", ".join(words))


_ISLAND = "float32 island"
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


def _short(names: Sequence[str]) -> str:
    return ", ".join(_SHORT.get(name, name) for name in names)


def _policy_text(row: ModuleRow) -> str:
    # An island gives what it was given, whatever the policy's output.
    out = row.returns[0] if row.rule == _ISLAND and len(row.returns) == 1 else row.output_dtype
    text = "/".join(_SHORT.get(name, name) for name in (row.param_dtype, row.compute_dtype, out))
    return text if row.grad_dtype is None else f"{text} g={_SHORT.get(row.grad_dtype, row.grad_dtype)}"


def summary(model: Any, policy: Any = None, *inputs: Any, **kwargs: Any) -> Summary:
    """Lists, per module, which rule governs it, and the dtypes of its parameters, computation and output.

    The model is traced, and nothing runs: inputs may be `jax.ShapeDtypeStruct`s.

    Args:
      model: a Linen or NNX module, bare or wrapped; or any function, whose named scopes are its rows.
      policy: a `PolicyMap`, a policy or its text. None for what `wrap` returned: the policy that it has.
      inputs, kwargs: arguments of the model's call. Those that are not arrays are static.

    Returns:
      A `Summary`; `print` shows it.

    Raises:
      TypeError, ValueError: for something that is not a model or policy, and for rules that match nothing.

    Example:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> model = nn.Sequential([nn.Dense(4), nn.LayerNorm()])
      >>> found = summary(model, "mixed_float16", jnp.ones((1, 8)))
      >>> [(row.type, row.rule, row.returns) for row in found.modules[1:]]
      [('Dense', 'default', ('float16',)), ('LayerNorm', 'float32 island', ('float16',))]
    """
    if isinstance(model, type):
        raise TypeError(f"summary takes a module, not its class: summary({model.__name__}(...), ...).")
    if isinstance(policy, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError("summary takes a policy before the inputs; None for the one that a model has.")
    if framework_of(model) is not None:
        if is_instance_of(model, "flax.linen", "Module"):
            from jmp_policy._src.report.summary_of_linen import described
        else:
            from jmp_policy._src.report.summary_of_nnx import described
        name, rules, rows, jaxpr = described(model, policy, inputs, kwargs)
        # It shows the layers whose size keeps them from following a recipe.
        reasons = defaultdict[str, list[str]](list)
        for eqn, site, *_ in Walk(jaxpr).operations:
            if eqn.primitive.name == "dot_general":
                # The first name is that of the model.
                reasons[site.path.partition("/")[2]].append(stays_in_half(eqn))
        rows = [_noted(row, reasons.get(row.path, [""])) for row in itertools.starmap(make_row, rows)]
        return _summary(name, repr(rules) if rules.overrides else str(rules.default), rules, rows)
    if not callable(model):
        raise TypeError(f"summary takes a module or a function, got {model!r:.200}.")
    return _of_function(model, policy, inputs, kwargs)


def _of_function(
    fn: Callable[..., Any], policy: Any, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Summary:
    """Summarises a function by its named scopes, in the precision that autocast gives them."""
    name = getattr(fn, "__name__", "function")
    if policy is None:
        raise TypeError(
            f"summary shows a function under autocast, and needs a policy for it: summary({name}, "
            "'mixed_float16', inputs), or --policy mixed_float16 on the command line."
        )
    rules = autocast_policy(policy)
    paths: dict[str, list[Any]] = {}
    for operation in explain(fn, policy)(*inputs, **kwargs).operations:
        paths.setdefault(operation.path, []).append(operation)
    rows = []
    for path, inside in paths.items():
        index = rules.governing(path)
        rows.append(
            ModuleRow(
                path=path,
                type="scope" if path else name,
                rule="default" if index is None else show_pattern(rules.overrides[index][0]),
                # Autocast does not cast arguments and results.
                param_dtype="-",
                compute_dtype=rules.resolve(path).compute_dtype.name,
                output_dtype="-",
                parameters=0,
                bytes=0,
                receives=tuple(filter(None, inside[0].operands.split(", "))),
                returns=tuple(filter(None, inside[-1].chosen.split(", "))),
                calls=1,
                note=f"{len(inside)} operations",
            )
        )
    return _summary(name, str(policy), rules, rows)
