"""A report compiles an equal program once, and never shows values of an earlier call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmpp
from jmp_policy._src.report import function
from jmp_policy._src.report.function import run_compiled


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Numbers of programs that were compiled, from an empty cache."""
    function._compiled_once.cache_clear()
    found, compile_one = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, *a, **k: found.append(1) or compile_one(self, *a, **k)
    )
    return found


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
@pytest.mark.parametrize("n", [1, 300])
def test_arrays_that_are_closed_over_are_those_of_this_call(kind, n, compiled):
    x, held = jnp.ones(n), {}

    def fn(x):
        return {"sum": (x * held["w"]).sum()}

    for factor in (1.0, 2.0, 3.0):
        held["w"] = kind(np.full(n, factor, np.float32))
        assert float(run_compiled(fn, x)["sum"]) == factor * n
    assert len(compiled) == 1
    held["w"] = 2.0  # A number of the program: another one.
    assert float(run_compiled(fn, x)["sum"]) == 2 * n
    run_compiled(fn, jnp.ones(n + 1))
    assert len(compiled) == 3


def test_constants_inside_of_calls_and_loops_are_those_of_this_call():
    for factor in (1.0, 2.0):
        w = np.full(3, factor, np.float32)

        @jax.custom_jvp
        def scaled(x, w=w):
            return x * w

        scaled.defjvp(lambda primals, tangents, w=w: (primals[0] * w, tangents[0] * w))

        def fn(x, scaled=scaled, w=w):
            inner = jax.jit(lambda x: scaled(x) + w)
            return jax.lax.scan(lambda c, _: (c + inner(x).sum() * w[0], None), 0.0, None, 2)[0]

        assert float(run_compiled(fn, jnp.ones(3))) == pytest.approx(2 * 6 * factor**2)


def test_places_of_arrays_are_part_of_a_program(compiled):
    devices = jax.devices()
    fn = jnp.sin
    for device in (devices[0], devices[1], devices[0]):
        x = jax.device_put(jnp.ones(3), device)
        assert run_compiled(fn, x).devices() == {device}
    assert len(compiled) == 2


def test_a_spectrum_is_compiled_once_and_shows_what_has_changed(compiled):
    held = {"target": jnp.ones(4)}

    def loss_fn(w):
        return jnp.sum((w - held["target"]) ** 2)

    first = jmpp.gradient_spectrum(loss_fn, jnp.zeros(4))
    held["target"] = jnp.full(4, 8.0, jnp.float32)
    second = jmpp.gradient_spectrum(loss_fn, jnp.zeros(4))
    assert (first.largest.largest, second.largest.largest) == (2.0, 16.0)
    assert len(compiled) == 1
