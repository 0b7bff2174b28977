"""Long reports show on a terminal how far they are, and Ctrl-C keeps what is known."""

import io
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmp_policy as jmpp
from jmp_policy._src.api import command_line
from jmp_policy._src.report import progress
from jmp_policy._src.report.drift import drift
from jmp_policy._src.report.sensitivity import recommend, rounding_errors
from jmp_policy._src.report.trials import Mending


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Makes stderr a terminal, in the test itself: pytest takes stderr back after fixtures."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    return shown


def loss(w, x):
    return jnp.square(x @ w).mean()


W, X = jnp.ones((8, 8)) / 3, jnp.ones((4, 8))


def test_steps_are_shown(monkeypatch):
    seen, stderr = [], terminal(monkeypatch)
    show = progress.step
    monkeypatch.setattr(progress, "step", lambda *args: (seen.append(args), show(*args)))
    jmpp.sensitivity(loss, W, X)
    assert [s for s in seen if s[0] == "modules"] == [("modules", 1, 1)]
    assert "sensitivity" in stderr.getvalue()
    assert progress._CURRENT.get() is None


def test_one_line_for_reports_within_reports(monkeypatch):
    terminal(monkeypatch)
    with progress.showing("recommend"):
        outer = progress._CURRENT.get()
        assert outer is not None
        with progress.showing("sensitivity"):
            assert progress._CURRENT.get() is outer


def test_nothing_is_shown_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    jmpp.drift(jmpp.autocast(loss, "float16"), W, X)
    assert capsys.readouterr().err == ""


def test_quick_reports_show_nothing(monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE", 60.0)
    jmpp.drift(jmpp.autocast(loss, "float16"), W, X)
    assert stderr.getvalue() == ""


def test_an_interrupted_command_has_no_traceback(monkeypatch, capsys):
    def interrupted(given):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_report", interrupted)
    assert command_line.main(["formats"]) == 130
    assert capsys.readouterr().err.endswith("formats: interrupted before anything was known\n")


@pytest.mark.slow
def test_an_interrupt_keeps_the_modules_that_were_measured(monkeypatch):
    def loss(w, x):
        with jax.named_scope("first"):
            h = x @ w
        with jax.named_scope("second"):
            return jnp.square(h @ w).mean()

    measured = rounding_errors.AppliedRounding.of_modules
    whole, calls = jmpp.sensitivity(loss, W, X), []

    def interrupted(self, groups):
        calls.append(groups)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return measured(self, groups)

    monkeypatch.setattr(rounding_errors.AppliedRounding, "of_modules", interrupted)
    assert len(whole.rows) > 1
    found = jmpp.sensitivity(loss, W, X)
    assert len(found.rows) == 1
    assert found.interrupted == "Interrupted at modules 2 of 2: modules from there on have no rows."
    assert str(found).startswith(found.interrupted)
    assert " ".join(str(found).split()).endswith(found.interrupted)
    assert found._repr_html_().count(found.interrupted) == 2
    assert found.to_dict()["interrupted"] == found.interrupted
    assert whole.interrupted == ""
    assert "interrupted" not in whole.to_dict()
    with pytest.raises(KeyboardInterrupt, match="^$"):
        jmpp.sensitivity(loss, W, X)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["_tried", "_gradient_under", "_rules"])
def test_an_interrupt_keeps_the_report_whose_rules_were_being_tried(monkeypatch, method):
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, name="last")(jnp.exp(nn.Dense(8, name="first")(x) * 30))

    def interrupted(self, *args):
        raise KeyboardInterrupt

    model, x = jmpp.wrap(Net(), "mixed_float16"), jnp.ones((2, 8))
    variables = model.init(jax.random.key(0), x)
    monkeypatch.setattr(Mending, method, interrupted)
    found = jmpp.diagnose(lambda v: model.apply(v, x).sum(), variables)
    assert (found.finite, found.operation, found.tried) == (False, "exp", ())
    assert found.interrupted.endswith(": other rules were not tried.")
    assert not jmpp.diagnose(lambda v: model.apply(v, 0 * x).sum(), variables).interrupted


@pytest.mark.slow
def test_an_interrupt_keeps_what_drift_measured_of_a_gradient_that_is_not_finite(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    def overflows(w, x):
        return jnp.square(1e3 * (x @ w)).mean()

    assert "an overflow" in jmpp.drift(jmpp.autocast(overflows, "float16"), 1e3 * W, X).cause
    monkeypatch.setattr(drift.diagnose, "of_loss", interrupted)
    found = jmpp.drift(jmpp.autocast(overflows, "float16"), 1e3 * W, X)
    assert (found.error, found.cause) == (float("inf"), "")
    assert "the cause was not looked for." in found.interrupted
    assert found.rows


def test_an_interrupt_keeps_the_first_comparison(monkeypatch):
    monkeypatch.setattr(drift.Comparison, "is_reliable", lambda *args: False)
    whole, run, calls = jmpp.drift(jmpp.autocast(loss, "float16"), W, X), drift.compiled_quickly, []

    def interrupted(comparison):
        calls.append(comparison)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return run(comparison)

    monkeypatch.setattr(drift, "compiled_quickly", interrupted)
    found = jmpp.drift(jmpp.autocast(loss, "float16"), W, X)
    assert [row.place for row in found.rows] == [row.place for row in whole.rows]
    assert (
        found.interrupted == "Interrupted at comparing both precisions once more: small errors may be wrong."
    )
    calls[:] = [None]
    with pytest.raises(KeyboardInterrupt, match="^$"):
        jmpp.drift(jmpp.autocast(loss, "float16"), W, X)


def test_an_interrupt_keeps_the_report_whose_loss_scale_was_being_tried(monkeypatch):
    def small(w):
        return 1e-6 * jnp.square(w.astype(jnp.float16)).astype(jnp.float32).mean()

    assert "A loss scale of 2**" in jmpp.drift(small, X).verdict

    measured = drift._drift_of

    def interrupted(function, grad, detail, loss_scale, has_aux):
        if loss_scale > 1:
            raise KeyboardInterrupt
        return measured(function, grad, detail, loss_scale, has_aux)

    monkeypatch.setattr(drift, "_drift_of", interrupted)
    found = jmpp.drift(small, X)
    assert found.interrupted.endswith("a loss scale was not tried.")
    assert found.gradient_error > 0.01
    assert "loss scale" not in found.verdict


@pytest.mark.slow
def test_an_interrupt_keeps_the_policy_that_was_tried(monkeypatch):
    import flax.linen as nn

    model, x = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(8)]), jnp.ones((2, 8)) / 3
    params, calls = model.init(jax.random.key(0), x), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setattr(recommend, "_error", interrupted)
    found = jmpp.recommend(
        lambda p: jnp.square(model.apply(p, x)).mean(), params, dtype="float16", budget=0.1
    )
    assert found.measured == 0.5
    assert "rules with less error were not tried" in found.interrupted
    assert found.interrupted in " ".join(str(found).split())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jax_debug_nans", "jax_debug_infs"])
def test_a_nan_that_jax_looks_for_is_what_a_report_finds(mode):
    """A user with a NaN has switched it on, and then asks the reports."""

    def bad(w, x):
        return jnp.log(-jnp.square(x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)).mean()

    with jax.debug_nans(mode == "jax_debug_nans"), jax.debug_infs(mode == "jax_debug_infs"):
        assert "log" in jmpp.diagnose(bad, W, X).verdict
        assert "The loss is nan in both" in jmpp.drift(bad, W, X).verdict
        assert not jmpp.drift(bad, W, X).is_normal
        assert jmpp.gradient_spectrum(lambda w, x: bad(w, x) / 0, W, X).verdict
        with pytest.raises(ValueError, match="not finite even where nothing is rounded"):
            jmpp.recommend(lambda w, x: jnp.log(-loss(w, x)), W, X)
        assert getattr(jax.config, mode)


@pytest.mark.parametrize("report", [jmpp.diagnose, jmpp.gradient_spectrum])
def test_a_warning_of_the_model_is_shown_once(report):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.linear(x) @ self.linear.kernel[:].T

    model, x = jmpp.wrap(Net(nnx.Rngs(0)), "mixed_float16"), jnp.ones((4, 8))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        report(lambda model: jnp.square(model(x)).mean(), model)
    assert ["runs in float32" in str(warning.message) for warning in shown] == [True]
