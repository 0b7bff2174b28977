"""Faults planted on purpose, and whether training survives them."""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import fault_steps as steps
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scale_sequences
from fault_steps import Row
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp

VALUES = {"NaN": np.nan, "inf": np.inf, "-inf": -np.inf}
WHEN = {"first step": (0,), "growth step": (3,), "three in a row": (5, 6, 7), "now and then": (2, 8, 9, 13)}
RUN = 18
DEVICES = 8


@functools.cache
def undisturbed(
    name: str, left_out: tuple[int, ...], scale: float, place: Any = None
) -> list[tuple[Any, Any]]:
    """State and loss after each step of a run on the same batches without those that a fault spoils."""
    training, out = steps.MODELS[name](), []
    state = steps.scaled_by(training.start, scale)
    state = place(state) if place else state
    for i, batch in enumerate(steps.batches()[:RUN]):
        if i not in left_out:
            state, loss, _ = training.step(state, batch, steps.Plant())
            out.append((state, loss))
    return out


def disturbed(
    name: str, plant: steps.Plant, at: tuple[int, ...], scale: float = steps.START, place: Any = None
) -> tuple[dict[str, bool], int]:
    """A run with a fault at some steps: what held, and how many steps were skipped."""
    training = steps.MODELS[name]()
    state = steps.scaled_by(training.start, scale)
    state = place(state) if place else state
    want = scale_sequences.plain([i in at for i in range(RUN)], scale, steps.CONFIG)
    clean = iter(undisturbed(name, at, scale, place))
    names = ("only these steps skipped", "nothing lost", "scale by the rule", "recovers", "same bits")
    held = dict.fromkeys(names, True)
    for i, batch in enumerate(steps.batches()[:RUN]):
        before = state
        state, loss, _ = training.step(state, batch, plant if i in at else steps.Plant())
        opt = state["opt_state"]
        scales = opt.loss_scale
        seen = (scales.loss_scale, scales.growth_tracker, scales.hysteresis_tracker, scales.stuck)
        held["scale by the rule"] &= [float(x) for x in seen] == [float(x) for x in want[i]]
        held["only these steps skipped"] &= bool(opt.grads_finite) is (i not in at)
        if i in at:
            held["nothing lost"] &= steps.same(steps.trained(before), steps.trained(state))
        else:
            expected, expected_loss = next(clean)
            # Within the rounding of float16 gradients at another scale.
            held["recovers"] &= bool(np.isclose(float(loss), float(expected_loss), rtol=1e-3, atol=0))
            now, then = (steps.trained(state), loss), (steps.trained(expected), expected_loss)
            held["same bits"] &= steps.same(now, then)
    return held, int(state["opt_state"].skipped)


def everywhere(
    row: Row, field: str, models: Iterable[str], rows: Iterable[int] = (0,), scale: float = steps.START
) -> Row:
    """NaN and infinities in one element, for some steps of a run."""
    for name, (kind, value), (when, at), r in itertools.product(models, VALUES.items(), WHEN.items(), rows):
        plant = steps.Plant(**{field: np.float32(value), "row": np.int32(r)})
        held, skipped = disturbed(name, plant, at, scale)
        row.count(f"{name}, {kind}, {when}, row {r}", held, skipped)
    return row


def transient(models: Iterable[str] = steps.MODELS, rows: Iterable[int] = range(4)) -> list[Row]:
    where = {
        "inputs": "one input",
        "labels": "one label",
        "parameters": "one parameter, as read in one step",
        "gradient": "one element of one gradient",
        "loss": "the loss only, gradients finite",
    }
    expected = "skipped, nothing else changes, training goes on"
    return [
        everywhere(Row(f"NaN, inf, -inf in {text}", expected), field, models, rows)
        for field, text in where.items()
    ]


def at_the_bounds(models: Iterable[str] = steps.MODELS) -> list[Row]:
    expected = "the scale stays within its bounds"
    return [
        everywhere(
            Row(f"the same in one gradient, scale at its {text}", expected), "gradient", models, scale=scale
        )
        for text, scale in (("floor", steps.FLOOR), ("ceiling", steps.CEILING))
    ]


def sharded(shards: Iterable[int] = range(DEVICES)) -> list[Row]:
    """A gradient sharded over eight devices, with the fault in the shard of one."""
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))

    def place(state: Any) -> Any:
        def spec(x: Any) -> Any:
            return P("d") if x.ndim == 2 and x.shape[0] % DEVICES == 0 else P()

        return jax.device_put(state, jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), state))

    per_shard = steps.WIDTHS[0] // DEVICES
    row = Row("one shard of a sharded gradient, 8 devices, jit", "all devices skip")
    mapped = Row("one device's gradient in shard_map with axis_name", "all devices skip")
    for shard, (kind, value) in itertools.product(shards, VALUES.items()):
        plant = steps.Plant(gradient=np.float32(value), row=np.int32(per_shard * shard))
        held, skipped = disturbed("Linen", plant, WHEN["growth step"], place=place)
        row.count(f"{kind}, shard {shard}", held, skipped)
        held, skipped = in_shard_map(mesh, value, shard)
        mapped.count(f"{kind}, device {shard}", held, skipped)
    return [row, mapped]


def microbatches(n: int = 4) -> list[Row]:
    """A fault in the inputs of one micro-batch of n, under both rules for such a batch."""
    tx = jmpp.loss_scaled(optax.adamw(0.1), jmpp.DynamicLossScale(steps.START, **steps.CONFIG))

    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) ** 2)

    @functools.partial(jax.jit, static_argnums=2)
    def step(state: Any, x: Any, dropping: bool) -> Any:
        on_nonfinite = "drop_microbatch" if dropping else "drop_window"
        found = jmpp.accumulate_gradients(loss_fn, n, on_nonfinite=on_nonfinite)(state[1], state[0], x)
        (_, grads), dropped = found if dropping else (found, jnp.int32(0))
        updates, opt_state = tx.update(grads, state[1], state[0], overflowed=dropped > 0)
        return (optax.apply_updates(state[0], updates), opt_state), dropped

    w = jnp.ones((steps.WIDTHS[0], 4))
    start, xs = (w, tx.init(w)), [batch["x"] for batch in steps.batches()[:6]]
    window = Row("one micro-batch of 4, `drop_window`", "the step is skipped")
    single = Row(
        "one micro-batch of 4, `drop_microbatch`", "a step on the rest of the batch, the scale falls"
    )
    for part, (kind, value), row in itertools.product(range(n), VALUES.items(), (window, single)):
        state, expected, held = start, start, {}
        for i, x in enumerate(xs):
            bad = x.copy()
            bad[part::n] += np.float32(value if i == 2 else 0)
            before = state
            state, dropped = step(state, bad, row is single)
            if i != 2:
                expected, _ = step(expected, x, False)
            elif row is single:
                rest = np.stack([x[j::n] for j in range(n) if j != part], 1).reshape(-1, x.shape[1])
                _, grads = jmpp.accumulate_gradients(loss_fn, n - 1)(before[1], before[0], rest)
                updates, opt_state = tx.update(grads, before[1], before[0])
                expected = optax.apply_updates(before[0], updates), opt_state
                held["one was dropped"] = int(dropped) == 1
                held["the step was taken"] = not steps.same(before[0], state[0])
            else:
                held["nothing lost"] = steps.same(
                    (before[0], before[1].inner_state), (state[0], state[1].inner_state)
                )
        trained, want = [(params, opt.inner_state) for params, opt in (state, expected)]
        close = zip(jax.tree.leaves(trained), jax.tree.leaves(want), strict=True)
        held["training goes on"] = all(np.allclose(a, b, rtol=1e-2, atol=1e-4) for a, b in close)
        if row is window:
            held["same bits"] = steps.same(trained, want)
        skipped = int(state[1].skipped)
        held["only this step skipped"] = skipped == (row is window)
        held["scale by the rule"] = float(state[1].loss_scale.loss_scale) == steps.START / 2
        row.count(f"{kind}, micro-batch {part}", held, skipped)
    return [window, single]


@functools.cache
def _mapped_step(mesh: Any) -> tuple[Any, Any]:
    tx = jmpp.loss_scaled(optax.adamw(0.1), jmpp.DynamicLossScale(steps.START), axis_name="d")
    start = (jnp.ones((DEVICES, 3)), tx.init(jnp.ones((DEVICES, 3))))
    specs = jax.tree.map(lambda x: P("d") if x.ndim else P(), start)

    def loss_fn(w: jax.Array) -> jax.Array:
        return jnp.sum(w.astype(jnp.float16).astype(jnp.float32) ** 2)

    def step(state: Any, poison: jax.Array) -> Any:
        return steps.taken(tx, loss_fn, *state, poison=poison)[1:]

    run = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("d")), out_specs=specs, check_vma=False)
    return jax.jit(run), start


def in_shard_map(mesh: Any, value: float, device: int) -> tuple[dict[str, bool], int]:
    """Six steps of eight devices with a parameter shard each; on the third one of them has the fault."""
    step, start = _mapped_step(mesh)
    clean, poison = np.zeros((DEVICES, 1), np.float32), np.zeros((DEVICES, 1), np.float32)
    poison[device] = value
    state, expected, nothing_lost = start, start, True
    for i in range(6):
        before = state
        state = step(state, poison if i == 2 else clean)
        if i == 2:
            old, new = [(params, opt.inner_state) for params, opt in (before, state)]
            nothing_lost = steps.same(old, new)
        else:
            expected = step(expected, clean)
    skipped, scale = int(state[1].skipped), float(state[1].loss_scale.loss_scale)
    got, want = [(params, opt.inner_state) for params, opt in (state, expected)]
    return {
        "only this step skipped": skipped == 1,
        "nothing lost": nothing_lost,
        "scale by the rule": scale == steps.START / 2,
        "same bits": steps.same(got, want),
    }, skipped


def through(name: str, state: Any, value: float = 0.0) -> tuple[list[Any], dict[str, bool], int]:
    """All states of a run with a value in the new statistics of one step; what holds; skipped steps."""
    states = []
    for i, batch in enumerate(steps.batches()[:RUN]):
        plant = steps.Plant(statistics=np.float32(value if i == 3 else 0))
        state, _, _ = steps.MODELS[name]().step(state, batch, plant)
        states.append(state)
    clean = undisturbed(name, (), steps.START)[-1][0]
    return (
        states,
        {"same bits": steps.same(clean["params"], state["params"])},
        int(state["opt_state"].skipped),
    )


def statistics(models: Iterable[str] = steps.MODELS) -> list[Row]:
    """Batch statistics alone: no gradient shows them."""
    fresh = Row(
        "NaN, inf, -inf in the new batch statistics only",
        "the step is taken, `all_finite` keeps the old statistics",
    )
    stored = Row("NaN in stored batch statistics", "no step skipped, training unharmed, NaN for good")
    for name in models:
        start = steps.MODELS[name]().start
        for kind, value in VALUES.items():
            states, held, skipped = through(name, start, value)
            held["old statistics kept"] = steps.same(states[2]["stats"], states[3]["stats"])
            held["next ones finite"] = bool(jmpp.all_finite(states[-1]["stats"]))
            fresh.count(f"{name}, {kind}", held, skipped)
        poisoned = {**start, "stats": steps.planted(start["stats"], np.nan, 0)}
        states, held, skipped = through(name, poisoned)
        held["still NaN"] = not bool(jmpp.all_finite(states[-1]["stats"]))
        stored.count(name, held, skipped)
    return [fresh, stored]


def hopeless(models: Iterable[str] = steps.MODELS, values: Iterable[str] = ("NaN", "inf")) -> list[Row]:
    """Faults that never go away: `check` must end the run, and say where."""
    expected = {
        "inputs": ("for ever in the inputs", "`check` ends the run at the floor and names `batch/x`"),
        "labels": ("for ever in the labels", "the same, `batch/y`"),
        "parameters": ("a stored parameter", "the same, `params/Dense_0/kernel`"),
        "gradient": ("for ever in one gradient", "the same, `['Dense_0']['kernel']: 1 NaN`"),
        "loss": ("for ever in the loss", "the same, `plant/loss`"),
    }
    rows = {field: Row(fault, outcome) for field, (fault, outcome) in expected.items()}
    for (field, row), name, kind in itertools.product(rows.items(), models, values):
        held, skipped = until_check_raises(name, field, VALUES[kind])
        row.count(f"{name}, {kind}", held, skipped)
    return list(rows.values())


def said_of(field: str, params: Any, value: float) -> str:
    """What the message must hold."""
    path = next(path for path, x in jax.tree_util.tree_leaves_with_path(params) if x.ndim == 2)
    slashes = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    places = {
        "inputs": "batch/x",
        "labels": "batch/y",
        "loss": "plant/loss",
        "parameters": f"params/{slashes}",
    }
    if field in places:
        return f"{places[field]} is not finite to begin with"
    numbers = "1 NaN, 0 inf" if np.isnan(value) else "0 NaN, 1 inf"
    return f"{jax.tree_util.keystr(path)}: {numbers} of"


def until_check_raises(name: str, field: str, value: float) -> tuple[dict[str, bool], int]:
    """Two clean steps, then the fault on every step: what held, skipped steps."""
    training, value = steps.MODELS[name](), np.float32(value)
    state, plant, message, before = training.start, steps.Plant(), "", training.start
    said = said_of(field, state["params"], float(value))
    for i, clean in enumerate(steps.batches()):
        batch = dict(clean)
        if i == 2:
            if field == "parameters":
                state = {**state, "params": steps.planted(state["params"], value, 0)}
            before = state
        if i >= 2 and field in ("inputs", "labels"):
            letter = {"inputs": "x", "labels": "y"}[field]
            batch[letter] = batch[letter].copy()
            batch[letter][0, 0] = value
        if i >= 2 and field in ("gradient", "loss"):
            plant = steps.Plant(**{field: value})
        state, _, grads = training.step(state, batch, plant)
        try:
            args = (state["params"], state["stats"], batch, plant)
            jmpp.check(state["opt_state"], grads, loss_fn=training.loss_fn, args=args, has_aux=True)
        except jmpp.LossScaleStuckError as error:
            message = str(error)
            break
    skipped = int(state["opt_state"].skipped)
    # As many skips as it takes to halve the scale down to its floor, and one that cannot.
    enough = int(np.log2(steps.START / steps.FLOOR)) + 1
    held = {
        "ended": "is at its floor" in message,
        "as soon as stuck": skipped == enough,
        "path named": said in message,
        "nothing lost": steps.same(steps.trained(before), steps.trained(state)),
    }
    return held, skipped


def integers() -> list[Row]:
    """Labels and token ids beyond their range: what optax and Flax make of them, and what follows."""
    classes = 4
    embed = jmpp.wrap(nn.Embed(classes, 2), "mixed_float16")
    graph, nnx_params = nnx.split(jmpp.wrap(nnx.Embed(classes, 2, rngs=nnx.Rngs(0)), "mixed_float16"))

    def of_labels(logits: jax.Array, ids: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    def of_tokens(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.sum(embed.apply(params, ids) ** 2)

    def of_tokens_nnx(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, params)(ids) ** 2)

    losses = {
        of_labels: jnp.arange(8.0, dtype=jnp.float32).reshape(2, 4),
        of_tokens: embed.init(jax.random.key(0), jnp.zeros(2, jnp.int32)),
        of_tokens_nnx: nnx_params,
    }
    beyond = Row(
        f"labels, token ids >= {classes} or < -{classes}", "NaN loss: skipped (optax: with finite gradients)"
    )
    negative = Row(f"labels, token ids from -{classes} to -1", "**not seen**: they count from the end")
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(steps.START))
    for loss_fn, params in losses.items():
        step = jax.jit(functools.partial(steps.taken, tx, loss_fn))
        for last in (4, 100, -5, -1, -4):
            loss, new, state = step(params, tx.init(params), jnp.array([0, last]))
            run, skipped = f"{loss_fn.__name__}, {last}", int(state.skipped)
            if -classes <= last < 0:
                from_the_end, _, _ = step(params, tx.init(params), jnp.array([0, last + classes]))
                negative.count(run, {"from the end": bool(loss == from_the_end)}, skipped)
            else:
                held = {"NaN loss": bool(jnp.isnan(loss)), "nothing lost": steps.same(params, new)}
                beyond.count(run, held | {"skipped": skipped == 1}, skipped)
    return [beyond, negative]


def nothing() -> list[Row]:
    """Empty trees and arrays of size zero."""
    row = Row("no parameters; parameters of size zero", "a step like any other")
    batch = Row("a batch of size zero (its mean is NaN)", "skipped")
    tx = jmpp.loss_scaled(optax.adamw(0.1), jmpp.DynamicLossScale(steps.START))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        used = [jnp.sum(p.astype(jnp.float16)).astype(jnp.float32) for p in jax.tree.leaves(params)]
        return jnp.mean(x) + sum(used, jnp.float32(0))

    step = functools.partial(steps.taken, tx, loss_fn)
    empty = jnp.zeros((0, 4))
    trees = {"{}": {}, "None": {"a": None}, "()": (), "(0,)": jnp.zeros(0), "(0, 4)": {"w": empty}}
    for (name, params), jitted in itertools.product(trees.items(), (False, True)):
        _, new, state = (jax.jit(step) if jitted else step)(params, tx.init(params), jnp.ones(2))
        held = {"unchanged": steps.same(new, params), "taken": bool(state.grads_finite)}
        row.count(f"{name}, jit {jitted}", held, int(state.skipped))
    params = {"w": jnp.ones(3)}
    for shape in ((0,), (0, 4)):
        _, new, state = jax.jit(step)(params, tx.init(params), jnp.zeros(shape))
        held = {"skipped": int(state.skipped) == 1, "nothing lost": steps.same(new, params)}
        batch.count(str(shape), held, int(state.skipped))
    return [row, batch]


def interrupted(rounds: int = 5, thread_rounds: int = 4) -> list[Row]:
    """Exceptions in the middle of a step, and threads."""
    expected = "old state whole; the step can be repeated"
    host = Row("exception or KeyboardInterrupt between gradient and update", expected)
    errors = (KeyboardInterrupt, steps.InterruptedStepError)
    for name, error, at in itertools.product(steps.MODELS, errors, range(rounds)):
        held = steps.on_the_host(steps.MODELS[name](), error, at)
        host.count(f"{name}, {error.__name__}, step {at}", held)
    kept = Row("KeyboardInterrupt in a callback of a jitted step", "the same")
    gone = Row("the same with donated buffers", "the state is gone: start from a checkpoint")
    for i in range(rounds):
        kept.count(str(i), steps.in_a_callback(donate=False))
        gone.count(str(i), steps.in_a_callback(donate=True))
    threads = Row("8 threads tracing under 9 policies at once, Linen and NNX", "each gets its own dtypes")
    threads.runs, threads.unexpected = steps.threads(DEVICES, thread_rounds)
    return [host, kept, gone, threads]
