"""What op-level autocast costs: per trace, per call, and in bytes kept for the backward pass.

Every ratio is of two things measured in turn in this process: the loss under `autocast`, the same loss in
float32, with `dtype=` in every layer, and of the wrapped model. Tracing and lowering is Python in one thread:
it is timed in seconds of this process, and its calls of Python functions are counted. `autocast_gpu_cost`
counts the same on a GPU.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.models import small
from benchmarks.table import Table

REPEATS = 11
CALLS = 151  # Timed one by one: a slow moment of the machine then hits few of them.
DTYPES = ("float16", "bfloat16")
LAYERS = 4
_encoder = functools.partial(small.Encoder, layers=LAYERS)
#: Name -> (model class, batch).
MODELS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "Transformer": (_encoder, small.tokens),
    "Transformer, scanned": (functools.partial(_encoder, scanned=True), small.tokens),
    "MLP": (small.MLP, small.vectors),
    "CNN + BatchNorm": (small.CNN, small.images),
}
#: Most of what tracing and lowering may take under autocast, over float32.
TARGETS = {"Transformer": 1.3, "Transformer, scanned": 1.15}
COMPARISONS = [
    ("autocast", "float32"),
    ("autocast", "by hand"),
    ("autocast", "wrapped"),
    ("by hand", "float32"),
    ("wrapped", "float32"),
]


def losses(cls: Any, dtype: str) -> dict[str, Callable[..., Any]]:
    """The ways to write a loss of `(params, stats, batch)`, which also gives the new statistics."""

    def loss(model: Any) -> Callable[..., Any]:
        return lambda params, stats, batch: steps.loss_and_stats(model, params, stats, batch)

    return {
        "float32": loss(cls()),
        "by hand": loss(cls(dtype=jnp.dtype(dtype))),
        "wrapped": loss(jmpp.wrap(cls(), f"mixed_{dtype}")),
        "autocast": jmpp.autocast(loss(cls()), dtype),
    }


def arguments(cls: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Parameters, statistics and batch: float32, whatever computes with them."""
    variables = cls().init(jax.random.key(0), batch[0])
    return variables["params"], variables.get("batch_stats", {}), batch


def counted(loss: Any, args: Any) -> dict[str, float]:
    """Calls of Python functions, and bytes that the backward pass gets before the compiler sees it.

    What `jax.vjp`'s function closes over, each array once: "parameters" are those that are arguments, and are
    in memory anyway; "residuals" are the others, half copies of parameters among them.
    """
    params, *others = args

    def residuals(params: Any, others: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, *others), params, has_aux=True)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, others).jaxpr
    variables = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    arguments = set(jaxpr.invars)
    sizes = {var: math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in variables}
    return {
        "python_calls": measure.python_calls(jax.value_and_grad(loss, has_aux=True), args),
        "residuals": sum(size for var, size in sizes.items() if var not in arguments),
        "parameters": sum(size for var, size in sizes.items() if var in arguments),
    }


def measured(cls: Any, dtype: str, args: Any) -> measure.Found:
    *state, batch = args
    made = losses(cls, dtype)

    def begun(loss: Any) -> Any:
        return lambda state, batch: jax.value_and_grad(loss, has_aux=True)(*state, batch), state

    each = {name: functools.partial(begun, loss) for name, loss in made.items()}
    found = measure.in_turn(each, batch, 0, traces=REPEATS, clock=time.process_time)
    for name, loss in made.items():
        found[name] |= {quantity: [value] for quantity, value in counted(loss, args).items()}
    return found


def rows() -> dict[str, Any]:
    """Ratios of one variant over another, the bytes of each variant, and times of calls."""
    ratios, memory = [], []
    for (model, (cls, make_batch)), dtype in itertools.product(MODELS.items(), DTYPES):
        found = measured(cls, dtype, arguments(cls, make_batch()))
        about: dict[str, Any] = {"model": model, "dtype": dtype}
        for over, under in COMPARISONS:
            row = {**about, "comparison": f"{over} / {under}"}
            row |= measure.compared(found, over, under, "trace_lower", *measure.COUNTS)
            for quantity in ("residuals", "python_calls"):
                row[quantity] = round(found[over][quantity][0] / found[under][quantity][0], 3)
            if model in TARGETS and (over, under) == ("autocast", "float32"):
                row["target"] = TARGETS[model]
            ratios.append(row)
        for name, by in found.items():
            sizes = ("residuals", "parameters", "temp", "bytes")
            row = {**about, "variant": name, **{f"{q}_megabytes": round(by[q][0] / 1e6, 3) for q in sizes}}
            row["trace_lower_ms"] = measure.spread([1e3 * t for t in by["trace_lower"]])
            memory.append(row)
    return {"rows": ratios, "memory": memory, "calls": calls()}


def calls() -> list[dict[str, Any]]:
    """Milliseconds per call of a small network, compiled and not.

    Uncompiled, `autocast` traces its function in every call. Each compiled function is there twice: what its
    second copy adds to the first is the noise.
    """
    cls, dtype = small.MLP, "bfloat16"
    args = arguments(cls, small.vectors(8))
    made = losses(cls, dtype)
    variants = {"f(x)": "float32", "f(x), by hand": "by hand", "autocast(f)(x)": "autocast"}
    functions = {name: made[variant] for name, variant in variants.items()}
    for name, variant in {"jit(f, by hand)(x)": "by hand", "jit(autocast(f))(x)": "autocast"}.items():
        for copy in (name, f"{name}, again"):
            functions[copy] = jax.jit(losses(cls, dtype)[variant])
    timed = {name: measure.milliseconds(functools.partial(f, *args)) for name, f in functions.items()}
    found = measure.interleaved(timed, CALLS)
    return [
        {
            "call": name,
            "ms": measure.spread(found[name]),
            "compared_with": base,
            "ratio": measure.ratio(found[name], found[base]),
        }
        for name in functions
        for base in ["f(x)" if name in variants else "jit(f, by hand)(x)"]
    ]


ABOUT = {"repeats": REPEATS, "timed_calls": CALLS, "layers": LAYERS}
TABLES = (Table("autocast_cost", rows, about=ABOUT),)
