"""Showing a plan: which operation runs in which dtype, and which rule chose it."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jmp_policy._src.autocast.api import Settings, check_function
from jmp_policy._src.autocast.planner import EqnPlan, How, as_traced
from jmp_policy._src.core.report_base import Report, Table
from jmp_policy._src.core.types import DTypeLike
from jmp_policy._src.jaxpr import calls, compat, ir, source_lines
from jmp_policy._src.policy.marked_regions import is_marker
from jmp_policy._src.policy.rules import PolicyLike, PolicyMap


@dataclasses.dataclass(frozen=True)
class Operation:
    """What autocast does with one operation on float32 arrays.

    Args:
      operation: name of the primitive, as a jaxpr shows it.
      path: names of the scopes around it, joined by slashes: modules of Flax and Haiku, named scopes.
      line: where it is in the source: "model.py:12 (function)"; "" if unknown.
      traced: dtype of its results without autocast.
      operands: dtype that its float32 operands are read in, the widest first if they differ.
      chosen: dtype of its results; that of the operands for comparisons.
      why: the rule that chose it.
      note: what to know if it stays in float32 against expectation, or "".
    """

    operation: str
    path: str
    line: str
    traced: str
    operands: str
    chosen: str
    why: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation(Report, Sequence[Operation]):
    """What autocast does with a function: a sequence of its operations, in order.

    `str` is a table. Operations without float32 arrays, and those of a loop's second trip, are left out.

    Args:
      operations: one for each operation of the trace, those inside loops and calls included.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import explain
      >>> found = explain(lambda w, x: jnp.tanh(x @ w) @ w, "float16")(jnp.ones((8, 8)), jnp.ones((1, 8)))
      >>> [(operation.operation, operation.operands) for operation in found]
      [('dot_general', 'float16'), ('tanh', 'float16'), ('dot_general', 'float16')]
    """

    operations: tuple[Operation, ...]

    _rows = "operations"

    def __len__(self) -> int:
        return len(self.operations)

    def __getitem__(self, index: Any) -> Any:
        return self.operations[index]

    def of(self, *names: str) -> list[Operation]:
        """Returns the operations of these primitives."""
        return [row for row in self.operations if row.operation in names]

    def _tables(self) -> Sequence[Table]:
        names = ("operation", "path", "line", "traced", "operands", "chosen", "why")
        rows = [tuple(getattr(row, name) for name in names) for row in self.operations]
        return [Table(names, rows)]

    def _lines(self) -> Sequence[str]:
        return sorted({f"Note: {row.note}" for row in self.operations if row.note})


def explain(
    fn: Callable[..., Any], policy: "PolicyMap | PolicyLike | DTypeLike | None" = None, **options: Any
) -> Callable[..., Explanation]:
    """Returns a function that shows what `autocast` would do with another one, and runs nothing.

    Args:
      fn, policy, options: as `autocast` takes them.

    Returns:
      A function that traces `fn` and returns an `Explanation`.

    Raises:
      TypeError, ValueError: as `autocast`.

    Example:
      >>> import jax.numpy as jnp
      >>> rows = explain(lambda w, x: jnp.exp(x @ w), "bfloat16")(jnp.ones((8, 2)), jnp.ones((3, 8)))
      >>> [(row.operation, row.operands, row.chosen) for row in rows]
      [('dot_general', 'bfloat16', 'float32'), ('exp', 'float32', 'float32')]
    """
    check_function(fn, "explain")
    settings = Settings(policy, **options)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        plan, _ = settings.trace(fn, args, kwargs)
        return Explanation(tuple(_rows(plan.steps, ())))

    return explained


def _rows(steps: Sequence[EqnPlan], outer: tuple[str, ...]) -> Iterator[Operation]:
    for step in steps:
        names = compat.scopes(step.eqn)
        path = (*outer, *(name for name in names if not is_marker(name)))
        if step.inner:
            for inner in step.inner:
                yield from _rows(inner.steps, path)
        elif any(map(ir.is_float32, (*step.eqn.invars, *step.eqn.outvars))):
            yield _row(step, "/".join(path))
            # What is inside of one that runs as it was traced: custom_vjps, solvers.
            inside = [eqn for j in calls.inner_jaxprs(step.eqn) for eqn in compat.open_jaxpr(j).eqns]
            yield from _rows([as_traced(eqn, step.why) for eqn in inside], path)


def _row(step: EqnPlan, path: str) -> Operation:
    eqn = step.eqn
    operands = {d.name for d in step.reads if d is not None}
    results = {v.dtype.name for v, var in zip(step.outs, eqn.outvars, strict=True) if ir.is_float32(var)}
    traced = {str(var.aval.dtype) for var in eqn.outvars if hasattr(var.aval, "dtype")}
    if step.how is How.MOVED:
        operands = results = {"each use's"}
    return Operation(
        operation=eqn.primitive.name,
        path=path,
        line=source_lines.source_line(eqn),
        traced=_joined(traced),
        operands=_joined(operands),
        chosen=_joined(results or operands),
        why=step.why,
        note=step.note,
    )


def _joined(names: set[str]) -> str:
    return ", ".join(sorted(names, reverse=True))
