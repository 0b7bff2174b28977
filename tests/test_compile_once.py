"""A report compiles an equal program once, and never shows values of an earlier call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmpp
from jmp_policy._src.report import pieces
from jmp_policy._src.report.pieces import compiled_quickly, totals
from jmp_policy._src.report.spectrum import histogram


def run_compiled(fn, *args):
    return compiled_quickly(fn)(*args)


@pytest.fixture(autouse=True)
def count():
    """A function to the number of pieces that were compiled, from an empty cache."""
    pieces._compiled.cache_clear()
    return lambda: pieces._compiled.cache_info().misses


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
@pytest.mark.parametrize("n", [1, 300])
def test_arrays_that_are_closed_over_are_those_of_this_call(kind, n, count):
    x, held = jnp.ones(n), {}

    def fn(x):
        return {"sum": (x * held["w"]).sum()}

    for factor in (1.0, 2.0, 3.0):
        held["w"] = kind(np.full(n, factor, np.float32))
        assert float(run_compiled(fn, x)["sum"]) == factor * n
    assert count() == 1
    held["w"] = 2.0  # A number of the program: another one.
    assert float(run_compiled(fn, x)["sum"]) == 2 * n
    run_compiled(fn, jnp.ones(n + 1))
    assert count() == 3


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


def test_a_program_runs_where_its_arrays_are():
    devices = jax.devices()
    fn = jnp.sin
    for device in (devices[0], devices[1], devices[0]):
        x = jax.device_put(jnp.ones(3), device)
        assert run_compiled(fn, x).devices() == {device}


def test_a_spectrum_is_compiled_once_and_shows_what_has_changed(count):
    held = {"target": jnp.ones(4)}

    def loss_fn(w):
        return jnp.sum((w - held["target"]) ** 2)

    first = jmpp.gradient_spectrum(loss_fn, jnp.zeros(4))
    before = count()
    held["target"] = jnp.full(4, 8.0, jnp.float32)
    second = jmpp.gradient_spectrum(loss_fn, jnp.zeros(4))
    assert (first.largest.largest, second.largest.largest) == (2.0, 16.0)
    assert count() == before > 0


def layers(count):
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w) + jnp.exp(-jnp.square(x)) * jnp.sin(x)
        return jnp.mean(x)

    key = jax.random.key(0)
    return jax.value_and_grad(loss), [jax.random.normal(key, (8, 8)) for _ in range(count)], jnp.ones((4, 8))


@pytest.mark.once
def test_equal_layers_are_compiled_once(count):
    found = {}
    for depth in (20, 40):
        pieces._compiled.cache_clear()
        gradient, *arguments = layers(depth)
        for array, expected in zip(
            jax.tree.leaves(run_compiled(gradient, *arguments)),
            jax.tree.leaves(jax.jit(gradient)(*arguments)),
            strict=True,
        ):
            np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-6)
        found[depth] = count()
    assert 1 < found[40] <= found[20] + 2 < 20


def test_pieces_that_differ_in_a_number_or_its_sign_are_others():
    for number in (0.0, -0.0, 1.0):
        assert (
            np.signbit(run_compiled(lambda x, n=number: x * n, jnp.ones(2))).tolist()
            == [np.signbit(number)] * 2
        )


def test_programs_without_operations_and_with_results_that_are_arguments():
    x, held = jnp.arange(3.0), jnp.ones(2)
    assert run_compiled(lambda: (), *()) == ()
    out = run_compiled(lambda x: {"same": x, "twice": [x, x], "number": 3, "held": held}, x)
    assert (out["same"] == x).all()
    assert (out["twice"][1] == x).all()
    assert (int(out["number"]), out["held"].tolist()) == (3, [1.0, 1.0])


def test_side_effects_stay_in_order(capfd):
    def fn(x):
        for i in range(100):
            x = jnp.sin(x) + jnp.cos(x)
            if i % 50 == 0:
                jax.debug.print("{}", i, ordered=True)
        return x

    run_compiled(fn, jnp.ones(3))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["0", "50"]


@pytest.mark.parametrize("in_scan", [False, True])
def test_pieces_that_read_another_result_of_an_operation_are_others(in_scan):
    def program(second):
        def fn(x, y):
            a, b = jax.lax.sort((x, y), num_keys=1)
            c = jnp.sin(a)
            return jnp.exp(c if second else b), -b, -c

        looped = lambda x, y: jax.lax.scan(lambda carry, _: (carry, fn(x, y)), 0, None, 1)[1]  # noqa: E731
        return looped if in_scan else fn

    x, y = jnp.array([3.0, 1.0, 2.0]), jnp.array([0.1, 0.2, 0.3])
    first, second = (run_compiled(program(which), x, y)[0] for which in (False, True))
    np.testing.assert_allclose(first.ravel(), np.exp([0.2, 0.3, 0.1]), rtol=1e-6)
    np.testing.assert_allclose(second.ravel(), np.exp(np.sin([1.0, 2.0, 3.0])), rtol=1e-6)


def test_an_array_that_was_changed_in_place_is_read_again():
    held = np.ones(4, np.float32)

    def fn(w):
        def scaled(w):
            return jax.jit(lambda c: c * held)(w)

        return jax.lax.cond(w[0] > 0, scaled, lambda w: w, w).sum()

    for factor in (1.0, 2.0, 3.0):
        held[:] = factor
        assert float(run_compiled(fn, jnp.ones(4))) == 4 * factor


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2**25,), (2**23, 4), (2**14, 3), (5,), (), (0,), (3, 0)])
def test_totals_of_many_numbers(shape):
    x = jnp.full(shape, 0.5)
    first, second, largest = jax.jit(lambda x: totals([x, 2 * x], -3 * x * -1))(x)
    assert (float(first), float(second)) == (0.5 * x.size, x.size)
    assert float(largest) == (1.5 if x.size else 0.0)


def test_parameters_that_may_change_are_equal_to_nothing():
    held = np.ones(2)
    assert pieces._value_form([1, "a", (2.0,)]) == pieces._value_form([1, "a", (2.0,)])
    for first, second in ((held, held), ([held], [held]), (1, True), (0.0, -0.0), ({"a": 1}, {"b": 1})):
        assert pieces._value_form(first) != pieces._value_form(second)


def test_long_loops_are_compiled_well():
    def levels(fn, x):
        program = pieces.Pieces(jax.make_jaxpr(fn)(x))
        return {
            dict(run.__wrapped__.__self__.options)["xla_backend_optimization_level"]
            for run, *_ in program.pieces
        }

    def looped(trips):
        return lambda x: jax.lax.fori_loop(0, trips, lambda _, x: jnp.sin(x) + 1, x)

    def convolved(x):
        return jax.lax.conv(x, jnp.ones((8, 8, 3, 3)), (1, 1), "SAME")

    assert levels(looped(10), jnp.ones(100)) == {0}
    assert levels(looped(100_000), jnp.ones(100)) == {1}
    assert levels(jnp.sin, jnp.ones(2**20)) == {1}
    assert levels(convolved, jnp.ones((1, 8, 8, 8))) == {0}
    assert levels(convolved, jnp.ones((32, 8, 64, 64))) == {0, 1}  # The convolution, and its kernel of ones.


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_counts_that_stand_by_themselves_are_done_in_numpy(dtype):
    def counted(x):
        return histogram.count(jnp.sin(x), 0.5)

    x = jnp.linspace(-1, 1, 48, dtype=dtype).reshape(6, 8)
    program = pieces.Pieces(jax.make_jaxpr(counted)(x))
    compiled = [run.__wrapped__.__self__ for run, *_ in program.pieces if hasattr(run, "__wrapped__")]
    names = {step.eqn.primitive.name for piece in compiled for step in piece.steps}
    assert "sin" in names
    assert "count_exponents" not in names
    for _ in range(2):
        np.testing.assert_array_equal(program([x])[0], jax.jit(counted)(x))
