"""Finds the number in a user's source that a constant of a traced program was written as.

JAX rounds a Python number to the dtype of the array that it meets while it traces: `x / 100000` of a float16
array is a division by infinity in the jaxpr, and nothing there says what was written. The line does.
"""

import ast
import functools
import linecache
from typing import Any

from jmp_policy._src.jaxpr import source_lines
from jmp_policy._src.jaxpr.op_table import PYTHON_OPERATORS

#: Python's operators between two values.
_OPERATORS: dict[str, type[ast.operator]] = {
    "+": ast.Add,
    "-": ast.Sub,
    "*": ast.Mult,
    "/": ast.Div,
    "%": ast.Mod,
    "**": ast.Pow,
}


def written_constants(eqn: Any) -> list[tuple[float, str]]:
    """Returns the numbers that stand in the source as operands of an operation.

    Args:
      eqn: an equation of a jaxpr.

    Returns:
      Each number, with its text and the operator before it: `(100000.0, "/ 100000")`. Where the operator is
      not in the user's expression, but in a function that it calls, the numbers given to calls. None where
      operands have other names, or the source cannot be read.
    """
    file, line = source_lines.caller(eqn)
    nodes = [node for node in _statement(file, line) if node.lineno <= line <= (node.end_lineno or line)]
    sign = PYTHON_OPERATORS.get(eqn.primitive.name, "")
    kind = _OPERATORS.get(sign)
    operations = [
        n for n in nodes if isinstance(n, ast.BinOp) and kind is not None and isinstance(n.op, kind)
    ]
    found = []
    for node in operations:
        found += [(value, text) for value, text in _numbers(node.left)]
        found += [(value, f"{sign} {text}") for value, text in _numbers(node.right)]
    if not operations:
        arguments = [
            a for n in nodes if isinstance(n, ast.Call) for a in (*n.args, *(k.value for k in n.keywords))
        ]
        found += [pair for argument in arguments for pair in _numbers(argument)]
    return found


def _numbers(node: ast.expr) -> list[tuple[float, str]]:
    """Returns the number that an expression is, or those that a call makes an array of."""
    if isinstance(node, ast.Call):
        # jnp.asarray(1e-8, x.dtype), jnp.float32(1e-8).astype(x.dtype)
        parts = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        return [pair for part in parts for pair in _numbers(part)]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return []
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [(float(value), ast.unparse(node))] if is_number else []


def _statement(file: str, line: int) -> list[Any]:
    """Returns the expressions of the smallest statement on a line, without those of statements inside it."""
    statements = [s for s in _statements(file) if s.lineno <= line <= (s.end_lineno or line)]
    if not statements:
        return []
    smallest = min(statements, key=lambda s: ((s.end_lineno or s.lineno) - s.lineno, -s.col_offset))
    inner, found = [smallest], []
    while inner:
        node = inner.pop()
        found += [node] if isinstance(node, ast.expr) else []
        inner += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
    return found


@functools.lru_cache(maxsize=16)
def _statements(file: str) -> list[Any]:
    try:
        parsed = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(parsed) if isinstance(node, ast.stmt)]
