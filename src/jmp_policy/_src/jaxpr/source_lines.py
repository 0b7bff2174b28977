"""Where in a user's code an operation of a jaxpr was written."""

import ast
import functools
import inspect
import linecache
import re
from typing import Any

import jax
import numpy as np
import optax

from jmp_policy._src.core.classes import imported_attr
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.jax_sources import directory_of, files_of
from jmp_policy._src.jaxpr.op_table import PYTHON_OPERATORS


def source_line(eqn: Any, around: str = "") -> str:
    """Where the user wrote the operation: "file.py:12 (function)"; "" if unknown.

    Within models made of layers of Flax and others that is where the model calls the layer; the layer's own
    line where no other is known. `around` is the line of the loop that the operation is in: of what is around
    that JAX keeps no frames there.
    """
    if (frame := _users_frame(eqn)) is not None:
        return f"{_short(frame.file_name)}:{frame.line_num} ({_plain(frame.function_name)})"
    if around:
        return around
    text = compat.source_summary(eqn)
    is_ours = text.startswith(directory_of("jmp_policy"))
    return "" if is_ours or text == "unknown" else re.sub(r"^.*[/\\](?=[^/\\]+:\d)", "", text)


def users_line(eqn: Any) -> tuple[str, int]:
    """The file and line of `source_line`, for a warning that is to point there; ("", 0) if unknown."""
    frame = _users_frame(eqn)
    return ("", 0) if frame is None else (frame.file_name, frame.line_num)


def _users_frame(eqn: Any) -> Any:
    frames = compat.frames(eqn)
    return next((f for f in frames if not f.file_name.startswith((*_libraries(), "<frozen"))), None)


def callers(eqn: Any) -> tuple[tuple[str, int], ...]:
    """The files and lines outside of JAX that an operation was traced in, innermost first."""
    hidden = (directory_of("jax"), directory_of("jmp_policy"), "<frozen")
    return tuple((f.file_name, f.line_num) for f in compat.frames(eqn) if not f.file_name.startswith(hidden))


def is_in_file_of(eqn: Any, function: Any) -> bool:
    """Whether a function, or another one of its file, does an operation or calls what does it."""
    return any(frame.file_name in files_of(function) for frame in compat.frames(eqn))


def is_written_in(eqn: Any, package: str) -> bool:
    """Whether an operation stands in a package ("optax"), and not in a function that it was given."""
    directory, found = directory_of(package), callers(eqn)
    return bool(directory and found) and found[0][0].startswith(directory)


def is_of_update(eqn: Any) -> bool:
    """Whether an operation is one of `optax.apply_updates`, which adds updates to parameters."""
    in_file = (f for f in compat.frames(eqn) if f.file_name in files_of(optax.apply_updates))
    return any("apply_updates" in frame.function_name for frame in in_file)


def is_of_autocast(eqn: Any) -> bool:
    """Whether the function that an operation was traced in, no loop's body, is one that `autocast` runs."""
    return any(frame.function_name == "_of_autocast" for frame in compat.frames(eqn))


def is_promotion(eqn: Any) -> bool:
    """Whether a conversion was made for a value to meet one of another dtype, not asked for by name.

    What jax.numpy promotes counts, and what a layer of Flax without a dtype converts to that of its operands.
    Flax's normalisation layers, JAX's sums and this library's islands compute in float32 on purpose, and a
    layer of NNX in the dtype that its policy gives it (`WithComplex`).
    """
    by_name = False
    for frame in compat.frames(eqn):
        if not frame.file_name.startswith(directory_of("jax")):
            # The first that is not JAX's own, and not Flax's function for it.
            if frame.file_name in _norm_files() or frame.file_name.startswith(directory_of("jmp_policy")):
                return False
            if "promote_dtype" in frame.function_name:
                by_name = False
                continue
            return not by_name
        if frame.file_name in files_of(jax.numpy.sum, jax.numpy.mean):
            return False
        name = _plain(frame.function_name)
        by_name = by_name or name in ("astype", "asarray", "array", "convert_element_type")
    return True


def _norm_files() -> tuple[str, ...]:
    """The files of Flax's normalisation layers that are imported: those that define BatchNorm.

    A name alone says nothing: a user's file may be called normalization.py too.
    """
    layers = (imported_attr(module, "BatchNorm") for module in ("flax.linen", "flax.nnx"))
    return tuple(inspect.getfile(layer) for layer in layers if layer is not None)


def _short(file_name: str) -> str:
    return re.sub(r"^.*[/\\]", "", file_name)


def _plain(function: str) -> str:
    """A function's name without where it was defined: "Net.__call__"."""
    return function.rpartition("<locals>.")[2]


def _libraries() -> tuple[str, ...]:
    """Directories of the packages in which a user does not look for the line that matters."""
    return tuple(filter(None, map(directory_of, ("jax", "flax", "optax", "equinox", "haiku", "jmp_policy"))))


def written_constants(eqn: Any) -> list[tuple[float, str]]:
    """The numbers that stand in the source as operands of an operation.

    Args:
      eqn: an equation of a jaxpr.

    Returns:
      Each number, with its text and the operator before it: `(100000.0, "/ 100000")`. Where the operator is
      not in the user's expression, but in a function that it calls, the numbers given to calls. None where
      operands have other names, or the source cannot be read.
    """
    file, line = next(iter(callers(eqn)), ("", 0))
    nodes = [node for node in _statement(file, line) if node.lineno <= line <= (node.end_lineno or line)]
    sign = PYTHON_OPERATORS.get(eqn.primitive.name, "")
    like: Any = ast.parse(f"0 {sign} 0", mode="eval").body if sign else None
    operations = [n for n in nodes if sign and isinstance(n, ast.BinOp) and type(n.op) is type(like.op)]
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
    """The number that an expression is, or those that a call makes an array of."""
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
    """The expressions of the shortest statements on a line, without those of statements inside them."""
    statements = [s for s in _statements(file) if s.lineno <= line <= (s.end_lineno or line)]
    lines = [(s.end_lineno or s.lineno) - s.lineno for s in statements]
    inner, found = [s for s, count in zip(statements, lines, strict=True) if count == min(lines)], []
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


def is_ambient_precision(eqn: Any) -> bool:
    """Whether a product has the precision of `jax.default_matmul_precision`, and not one of its own.

    JAX's linear algebra asks for one of its own, which may be the same.
    """
    asked = eqn.params["precision"], jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    exact = files_of(jax.scipy.linalg.expm, jax.lax.linalg.qr, jax.lax.linalg.qdwh)
    return _is_ambient(*asked) and not any(
        frame.file_name in exact or frame.function_name in ("_pinv", "_pinv_jvp", "_lstsq")
        for frame in compat.frames(eqn)
    )


@functools.lru_cache(maxsize=16)
def _is_ambient(precision: Any, _: Any) -> bool:
    one = np.ones((1, 1), np.float32)
    dot = compat.open_jaxpr(jax.make_jaxpr(jax.lax.dot)(one, one)).eqns[0]
    return dot.params["precision"] == precision
