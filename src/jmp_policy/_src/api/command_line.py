"""Runs reports from the command line, as `python -m jmp_policy`.

python -m jmp_policy formats 1e-8 70000
python -m jmp_policy audit my_model:train_step 'f32[64,784]' 'i32[64]'
python -m jmp_policy diagnose my_model:failing_step
python -m jmp_policy drift my_model:example --detail operation
python -m jmp_policy lowering my_model:example --target A100
python -m jmp_policy memory my_model:train_step 'f32[64,784]' --policy bfloat16
python -m jmp_policy recommend my_model:example --budget 0.01
python -m jmp_policy summary my_model:model 'f32[64,784]' --policy mixed_float16
"""

import argparse
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_policy._src.autocast.api import autocast
from jmp_policy._src.core.targets import TARGETS

#: What each command says.
_COMMANDS = {
    "audit": "every product of a function: dtypes, sizes, FLOPs, what to pad",
    "diagnose": "where the first value that is not finite comes from",
    "drift": "how far half precision is from float32, and where that is introduced",
    "lowering": "the kernels that XLA makes for a GPU or TPU",
    "memory": "what takes the memory, compiled for the default backend",
    "recommend": "the policy with the most in half precision, for a budget of error",
    "sensitivity": "what half precision in each module does to the gradient",
    "spectrum": "magnitudes of gradients and activations, and what half precision loses of them",
    "summary": "which rule governs which module of a model, in which dtypes",
    "formats": "the number formats, and what a number becomes in each",
}
#: Commands that run the function, and their options.
_RUN = {
    "diagnose": ("scale",),
    "drift": ("detail", "grad"),
    "recommend": ("budget", "target"),
    "sensitivity": (),
    "spectrum": ("scale",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit status.

    Args:
      arguments: what stands behind `python -m jmp_policy` on the command line; by default those of the
        process.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        report = _report(given)
    except Exception as error:
        print(f"{parser.prog} {given.command}: {_error_text(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog} {given.command}: interrupted before anything was known", file=sys.stderr)
        return 130
    print(_as_json(report.to_dict()) if given.json else report)
    return 0


def _error_text(error: Exception) -> str:
    """The message; of an unusual error its type too, and the line that raised it."""
    if isinstance(error, ValueError | TypeError | ImportError | RuntimeError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"


def _as_json(fields: Any) -> str:
    """Formats plain data as strict JSON, in which numbers that are not finite are null."""
    return json.dumps(json.loads(json.dumps(fields), parse_constant=lambda _: None), indent=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jmp_policy", description="What runs in which precision, before anything runs."
    )
    version = sys.modules[__name__.partition(".")[0]].__version__
    parser.add_argument("--version", action="version", version=f"jmp_policy {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    where = (
        "module:function. Called with the arrays described behind it; without any, it takes no arguments and "
        "returns (function, *arguments) to look at."
    )
    arrays = "arguments as types: 'f32[64,784]', 'bf16[8]', 'i32[]'"
    known = f"{', '.join(TARGETS)}, or a slice of TPUs as in v5e:2x4"
    factor = "what the loss is multiplied by, for the backward pass"
    parsers = {name: commands.add_parser(name, help=text) for name, text in _COMMANDS.items()}
    for name, command in parsers.items():
        add, is_model = command.add_argument, name == "summary"
        add("--json", action="store_true", help="as JSON instead of a table")
        if name == "formats":
            add("numbers", nargs="*", type=float, help="any numbers; put -- before negative ones")
            continue
        add("function", help=f"{where} A model in place of the function." if is_model else where)
        drawn = "; filled with normal random numbers" if name in _RUN else ""
        add("arrays", nargs="*", help=arrays + drawn)
        if name not in ("recommend", "sensitivity"):
            policy = "the model's policy" if is_model else "autocast the function under this policy first"
            add("--policy", help=policy)
        if name in ("audit", "lowering", "memory"):
            add("--grad", action="store_true", help="the gradients of a loss in its first argument too")
        if name in ("diagnose", "spectrum"):
            add("--scale", type=float, default=1.0, help=factor)
    add = parsers["drift"].add_argument
    add("--no-grad", dest="grad", action="store_false", help="compare the results of the function alone")
    add("--detail", default="module", help="module, or operation")
    add = parsers["recommend"].add_argument
    add("--budget", type=float, help="the largest relative error of the gradient; by default 0.01")
    add("--target", help=f"a GPU to say what it gains there: {known}")
    parsers["lowering"].add_argument("--target", default="H100", help=known)
    parsers["memory"].add_argument("--target", help=f"{known}; without it, the default backend")
    return parser


def _report(given: Any) -> Any:
    """Runs the report that was asked for."""
    from jmp_policy._src.api import reports  # Loaded where one is asked for.

    if given.command == "formats":
        return reports.formats(*given.numbers)
    fn, args = _function(given)
    if given.command == "summary":
        return reports.summary(fn, given.policy, *args)
    if getattr(given, "policy", None):
        fn = autocast(fn, given.policy)
    if given.command == "audit":
        return reports.audit(fn, *args, grad=given.grad)
    if given.command in _RUN:
        options = {name: value for name, value in vars(given).items() if name in _RUN[given.command]}
        report = getattr(reports, "gradient_spectrum" if given.command == "spectrum" else given.command)
        return report(fn, *jax.tree.map(_filled, args), **options)
    if given.grad:
        fn = jax.value_and_grad(fn, has_aux=isinstance(jax.eval_shape(fn, *args), tuple))
    report = reports.lowering_report if given.command == "lowering" else reports.memory_report
    return report(fn, *args, target=given.target)


def _filled(leaf: Any) -> Any:
    """An array of a type: normal random numbers, zeros for other than floating dtypes."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return jax.random.normal(jax.random.key(0), leaf.shape).astype(leaf.dtype)


def _function(given: Any) -> tuple[Any, Sequence[Any]]:
    fn = _imported(given.function)
    args: Sequence[Any] = [_array_type(text) for text in given.arrays]
    if not args:
        try:
            inspect.signature(fn).bind()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{given.function} needs arguments: describe its arrays ('f32[64,784]' 'i32[64]'), or name a "
                f"function that returns (function, *arguments). {error}."
            ) from error
        made = fn()
        if not isinstance(made, tuple | list) or not made or not callable(made[0]):
            raise ValueError(
                f"{given.function}() must return (function, *arguments) when no types of arrays are given; "
                f"it returned {type(made).__name__}. Or describe its arguments, as in 'f32[64,784]'."
            )
        fn, *args = made
    elif not _may_take_arguments(fn):
        raise ValueError(
            f"{given.function} takes no arguments: name the function or model that takes these arrays, or "
            "let it return (function, *arguments) and give none."
        )
    return fn, args


def _may_take_arguments(fn: Any) -> bool:
    try:
        return bool(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # No function, or not written in Python.
        return True


def _imported(text: str) -> Any:
    module, _, names = text.partition(":")
    if not names:
        raise ValueError(f"{text!r} does not say which function: module:function, as in my_model:train_step.")
    sys.path.insert(0, os.getcwd())
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        if not hasattr(found, name):
            public = ", ".join(n for n in vars(found) if not n.startswith("_"))
            raise ValueError(f"{module} has no {names!r}; it has {public}.")
        found = getattr(found, name)
    if not callable(found):
        raise ValueError(f"{text} is no function but {type(found).__name__}.")
    return found


_KINDS = {"f": "float", "bf": "bfloat", "i": "int", "s": "int", "u": "uint", "c": "complex"}


def _array_type(text: str) -> Any:
    match = re.fullmatch(r"([a-z_0-9]+)\[([\d,\s]*)\]", text.strip())
    if not match:
        raise ValueError(f"{text!r} is no type of arrays; they look like 'f32[64,784]', 'bf16[8]', 'i32[]'.")
    name, sizes = match.groups()
    kind = name.rstrip("0123456789")
    name = "bool" if name == "pred" else _KINDS.get(kind, kind) + name.removeprefix(kind)
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        raise ValueError(f"{text!r}: there is no dtype {name!r}.") from error
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{text!r}: JAX has 64 bits only with the environment variable JAX_ENABLE_X64=1.")
    return jax.ShapeDtypeStruct(tuple(int(size) for size in sizes.split(",") if size.strip()), dtype)
