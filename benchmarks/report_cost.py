"""What it costs to look while training: spectra of gradients and activations, and groups' magnitudes.

Every number is a ratio to the same step without looking, compiled and timed in turn in this process; a step
that is taken every 100 steps counts as a hundredth. Aim: below 5 %.
"""

from typing import Any

import jax
import optax

import jmp_policy as jmpp
from benchmarks import _measure, _models, _record, _steps

REPEATS = 11
EVERY = 100
MODELS = ("CNN + BatchNorm", "Transformer")


def variants(cls: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
    """Step and initial state, a pair of the training state and a spectrum, of the ways to look."""
    tx = optax.adamw(1e-3)
    model = jmpp.wrap(cls(), "mixed_float16")

    def step(scaled: Any, *, taps: bool = False, every: int = 0) -> Any:
        def run(carry: Any, batch: Any) -> Any:
            state, spectrum = carry

            def loss_fn(params: Any) -> Any:
                return _steps.loss_and_stats(model, params, state.stats, batch)

            if taps:
                gradient = jmpp.spectrum_value_and_grad(loss_fn, has_aux=True)
                ((loss, stats), grads), spectrum = gradient(state.opt_state, spectrum, state.params)
            else:
                gradient = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)
                (loss, stats), grads = gradient(state.opt_state, state.params)
                if every:
                    spectrum = spectrum.update(grads, state.opt_state, every=every)
            updates, opt_state = scaled.update(grads, state.opt_state, state.params)
            if stats:
                stats = jmpp.select_tree(jmpp.grads_finite(opt_state), stats, state.stats)
            params = optax.apply_updates(state.params, updates)
            return (_steps.State(params, stats, opt_state), spectrum), loss

        return run

    plain = jmpp.loss_scaled(tx, jmpp.DynamicLossScale())
    monitored = jmpp.loss_scaled(tx, jmpp.DynamicLossScale(), monitor=True)
    state = _steps.init(model, plain, batch)

    def loss_fn(params: Any) -> Any:
        return _steps.loss_and_stats(model, params, state.stats, batch)

    weights = jmpp.SpectrumState.create(state.params)
    both = jmpp.SpectrumState.create(state.params, loss_fn)
    return {
        "nothing": (step(plain), (state, ())),
        "monitor=True": (step(monitored), (_steps.init(model, monitored, batch), ())),
        "weights": (step(plain, every=1), (state, weights)),
        f"weights, every={EVERY} in one step": (step(plain, every=EVERY), (state, weights)),
        "weights and activations": (step(plain, taps=True), (state, both)),
    }


def measure(cls: Any, batch: Any) -> dict[str, dict[str, list[float]]]:
    """Times and counts of every variant: quantity -> variant -> repeats."""
    made = variants(cls, batch)
    found: dict[str, dict[str, list[float]]] = {}
    compiled = {}
    for name, (step, state) in made.items():
        _, traced, lowered = _measure.trace_times(step, (state, batch))
        _, compiled[name] = _measure.compile_time(lowered)
        for quantity, value in _measure.counts(traced, compiled[name]).items():
            found.setdefault(quantity, {})[name] = [value]

    def run(name: str) -> Any:
        # After one call, so that with `every` the calls timed are those that do not count.
        (state, spectrum) = made[name][1]
        if isinstance(spectrum, jmpp.SpectrumState):
            spectrum = compiled[name]((state, spectrum), batch)[0][1]
        return lambda: _measure.step_time(compiled[name], (state, spectrum), batch)

    found["step"] = _measure.interleaved({name: run(name) for name in made}, REPEATS)
    return found


def rows() -> list[dict[str, Any]]:
    """One row per model and way to look."""
    found = []
    for model in MODELS:
        cls, batch = _models.TABLE[model]
        measured = measure(cls, batch())
        for name in measured["step"]:
            row: dict[str, Any] = {"model": model, "looks at": name}
            for quantity, by_variant in measured.items():
                row[quantity] = _measure.compare(quantity, by_variant[name], by_variant["nothing"])
            if name.startswith("weights") and "every" not in name:
                # Memory is that of the larger of the two steps, while it runs.
                row[f"step, 1 of {EVERY}"] = round(1 + (row["step"]["median"] - 1) / EVERY, 4)
                row[f"bytes, 1 of {EVERY}"] = round(1 + (row["bytes"] - 1) / EVERY, 4)
            found.append(row)
    return found


def main() -> None:
    _record.save("report_cost", rows(), repeats=REPEATS, backend=jax.default_backend())


if __name__ == "__main__":
    main()
