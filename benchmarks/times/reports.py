"""What it costs to look while training, and what `drift` costs.

`report_cost`: spectra of gradients and activations, and groups' magnitudes. Every number is a ratio to the
same step without looking; a step that is taken every 100 steps counts as a hundredth. Aim: below 5 %.

`first_call`: what the first call of each report takes, beside that of the gradient in float32: tracing,
compiling and running, in CPU seconds.

`lines_printed`: the lines that a report on 16 equal layers takes, and all its rows.

`drift_cost`: time and memory of a second run beside those of the loss and its gradients in float32. Times are
of this process's CPU. What `drift` runs once is compiled for that: sooner done, and slower.
"""

import functools
import statistics
import time
from typing import Any

import jax

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.accuracy.modules import loss_and_params, under
from benchmarks.models import MODELS, gpt, small
from benchmarks.models._model import cross_entropy, next_tokens
from benchmarks.table import Table
from jmp_policy._src.report import pieces
from jmp_policy._src.report.drift.comparison import Comparison
from jmp_policy._src.report.pieces import Pieces, compiled_quickly

REPEATS = 11
EVERY = 100


def looks(bare: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
    """Step and first state, a pair of the training state and a spectrum, of the ways to look."""
    model = jmpp.wrap(bare, "mixed_float16")
    plain, monitored = (
        jmpp.loss_scaled(steps.ADAMW, jmpp.DynamicLossScale(), monitor=monitor) for monitor in (False, True)
    )
    state = steps.init(model, plain, batch)

    def loss_of(state: Any, batch: Any) -> Any:
        return lambda params: steps.loss_and_stats(model, params, state.stats, batch)

    def step(scaled: Any, *, taps: bool = False, every: int = 0) -> Any:
        def run(carry: Any, batch: Any) -> Any:
            state, spectrum = carry
            if taps:
                gradient = jmpp.report.spectrum_value_and_grad(loss_of(state, batch), has_aux=True)
                ((loss, stats), grads), spectrum = gradient(state.opt_state, spectrum, state.params)
            else:
                gradient = jmpp.scaled_value_and_grad(loss_of(state, batch), has_aux=True)
                (loss, stats), grads = gradient(state.opt_state, state.params)
                if every:
                    spectrum = spectrum.update(grads, state.opt_state, every=every)
            return (steps.updated(state, scaled, grads, stats), spectrum), loss

        return run

    weights = jmpp.report.SpectrumState.create(state.params)
    both = jmpp.report.SpectrumState.create(state.params, loss_of(state, batch))
    return {
        "nothing": (step(plain), (state, ())),
        "monitor=True": (step(monitored), (steps.init(model, monitored, batch), ())),
        "weights": (step(plain, every=1), (state, weights)),
        f"weights, every={EVERY} in one step": (step(plain, every=EVERY), (state, weights)),
        "weights and activations": (step(plain, taps=True), (state, both)),
    }


def look_rows(model: str) -> list[dict[str, Any]]:
    bare, batch = small.TABLE[model].module, small.TABLE[model].batch()
    rare = f"weights, every={EVERY} in one step"

    def begun(name: str, step: Any, carry: Any) -> tuple[Any, Any]:
        # After one call, so that with `every` the calls timed are those that do not count.
        return step, jax.jit(step)(carry, batch)[0] if name == rare else carry

    each = {name: functools.partial(begun, name, *parts) for name, parts in looks(bare, batch).items()}
    found = measure.in_turn(each, batch, REPEATS, traces=0)
    rows = []
    for name in found:
        row = {"looks at": name, **measure.compared(found, name, "nothing", *measure.COUNTS, "step")}
        if name.startswith("weights") and name != rare:
            # Memory is that of the larger of the two steps, while it runs.
            row[f"step, 1 of {EVERY}"] = round(1 + (row["step"]["median"] - 1) / EVERY, 4)
            row[f"bytes, 1 of {EVERY}"] = round(1 + (row["bytes"] - 1) / EVERY, 4)
        rows.append(row)
    return rows


DRIFT_REPEATS = 7
DETAILS = {"result": False, "module": True}


def programs(bare: Any, batch: Any) -> tuple[dict[str, Any], Any]:
    """Functions of the parameters, to be jitted: the step in both precisions, and what `drift` runs."""
    half = jmpp.wrap(bare, "mixed_float16")
    state = steps.init(bare, steps.ADAMW, batch)

    def step(model: Any, params: Any) -> Any:
        return jax.value_and_grad(lambda p: steps.loss_and_stats(model, p, state.stats, batch)[0])(params)

    jaxpr = jax.make_jaxpr(functools.partial(step, half))(state.params)
    found = {"float32": functools.partial(step, bare), "mixed_float16": functools.partial(step, half)}
    for detail, measures in DETAILS.items():
        comparison = Comparison(jaxpr, measures, quick=measures)
        found[f"drift, {detail}"] = lambda params, c=comparison: c(jax.tree.leaves(params))
    return found, state.params


def drift_rows(model: str) -> list[dict[str, Any]]:
    functions, params = programs(small.TABLE[model].module, small.TABLE[model].batch())
    in_pieces = [name for name in functions if name.startswith("drift") and "result" not in name]
    compiled = {
        name: compiled_quickly(f) if name in in_pieces else jax.jit(f).lower(params).compile()
        for name, f in functions.items()
    }
    timed = {
        name: functools.partial(measure.seconds, functools.partial(c, params), time.process_time)
        for name, c in compiled.items()
    }
    for run in timed.values():
        run()
    times = measure.interleaved(timed, DRIFT_REPEATS)
    memory = {
        name: peak_in_pieces(functions[name], params) if name in in_pieces else peak(compiled[name])
        for name in compiled
    }
    rows = []
    for name in compiled:
        ratios = sorted(a / b for a, b in zip(times[name], times["float32"], strict=True))
        rows.append({
            "program": name,
            "cpu_time": round(statistics.median(ratios), 3),
            "cpu_time_low": round(ratios[0], 3),
            "cpu_time_high": round(ratios[-1], 3),
            "memory": round(memory[name] / memory["float32"], 3),
        })  # fmt: skip
    return rows


def peak(program: Any) -> int:
    """Bytes of a compiled program while it runs."""
    sizes = program.memory_analysis()
    return sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes


def peak_in_pieces(function: Any, params: Any) -> int:
    """Bytes of a program that is compiled in pieces: at most those of a piece and of what waits meanwhile."""
    most = 0

    def watched(run: Any) -> Any:
        def call(*arrays: Any) -> Any:
            nonlocal most
            waiting = sum(x.nbytes for x in jax.live_arrays())
            program, outs = run.lower(*arrays).compile(), run(*arrays)
            made = program.memory_analysis()
            most = max(most, waiting + made.temp_size_in_bytes + made.output_size_in_bytes)
            return outs

        return call

    before = sum(x.nbytes for x in jax.live_arrays())
    program = Pieces(jax.make_jaxpr(function)(params))
    program.pieces = [(watched(run), *numbers) for run, *numbers in program.pieces]
    program(jax.tree.leaves(params))
    return most - before


def first_calls(model: str) -> list[dict[str, Any]]:
    """CPU seconds of the first call of every report, over those of one gradient in float32.

    Compiling a gradient takes several threads, so that its time varies: of three the middle one counts.
    """

    def first(run: Any) -> float:
        jax.clear_caches()
        pieces.clear()
        return measure.seconds(run, time.process_time)

    loss, params, (batch, *_) = loss_and_params(model)
    half, scale = under(loss, "mixed_float16"), 2.0**10
    runs = {
        "gradient": lambda: jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(params, batch)),
        "audit": lambda: jmpp.audit(half, params, batch, grad=True),
        "diagnose": lambda: jmpp.diagnose(half, params, batch, scale=scale),
        "gradient_spectrum": lambda: jmpp.gradient_spectrum(half, params, batch, scale=scale),
        "drift": lambda: jmpp.drift(half, params, batch, scale=scale),
        "sensitivity": lambda: jmpp.sensitivity(loss, params, batch),
        "recommend": lambda: jmpp.recommend(loss, params, batch, dtype="float16"),
    }
    seconds = {name: first(run) for name, run in runs.items()}
    again = [first(runs["gradient"]) for _ in range(2)]
    seconds["gradient"] = statistics.median([seconds["gradient"], *again])
    ratios = {name: round(taken / seconds["gradient"], 1) for name, taken in seconds.items()}
    return [{**ratios, "gradient": round(seconds["gradient"], 1)}]


def lines_printed() -> list[dict[str, Any]]:
    """Lines of each report on a GPT of 16 layers."""
    module = gpt.GPT(vocabulary=64, length=16, hidden=32, heads=2, mlp=64, layers=16)
    (tokens,), targets = next_tokens(4, module.length, module.vocabulary)(jax.random.key(0))
    params = module.init(jax.random.key(1), tokens)

    def loss(params: Any) -> Any:
        return cross_entropy(module.apply(params, tokens), targets)

    def half(params: Any) -> Any:
        return cross_entropy(jmpp.wrap(module, "mixed_float16").apply(params, tokens), targets)

    found = {
        "summary": jmpp.summary(module, "mixed_float16", tokens),
        "audit": jmpp.audit(half, params, grad=True),
        "gradient_spectrum": jmpp.gradient_spectrum(loss, params),
        "drift": jmpp.drift(half, params),
        "sensitivity": jmpp.sensitivity(loss, params),
        "memory_report": jmpp.memory_report(jax.value_and_grad(half), params),
        "lowering_report": jmpp.lowering_report(jax.value_and_grad(half), params, target="H100"),
    }
    return [
        {"report": name, "lines": len(str(r).splitlines()), "all": len(r.table(full=True).splitlines())}
        for name, r in found.items()
    ]


LOOKED_AT = ("CNN + BatchNorm", "Transformer")
TABLES = (
    Table("report_cost", look_rows, by={"model": LOOKED_AT}, about={"repeats": REPEATS}),
    Table("first_call", first_calls, by={"model": MODELS}),
    Table("lines_printed", lines_printed),
    Table("drift_cost", drift_rows, by={"model": small.TABLE}, about={"repeats": DRIFT_REPEATS}),
)
