"""Does half precision learn what float32 learns? Small tasks whose data is there without a network.

`python -m benchmarks accuracy` trains every task from five seeds in each precision. A seed gives the initial
values and the order of the batches, the same ones in every precision; the split into training and test data
is fixed. So the difference between two precisions is taken seed by seed. A control, float32 with half the
learning rate, shows which results can tell two ways of training apart at all.

What float16 cannot do without loss scaling shows when the loss is small: some runs minimise 2**-24 times it,
as happens to one term of a weighted loss, or to squared errors in large units. The optimizer divides by the
weight, a power of two, which float32 cannot tell. In float16 magnitudes up to 2**-25 are 0, and the weight
takes almost all gradients there.

All seeds of a precision are one program, by `jax.vmap`: each has a loss scale of its own and skips on its
own. XLA may leave out pairs of casts that only round; here it may not.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats
from sklearn import datasets

import jmp_policy as jmpp
from benchmarks import steps as train_steps
from benchmarks.models.gpt import GPT
from benchmarks.table import Table

SEEDS = range(5)
CONFIDENCE = 0.95
SMALL = 2.0**-24
#: The default is 2000, longer than these runs. This way the scale climbs; where it overflows, steps are lost.
GROWTH_INTERVAL = 100
#: Rounding as the policy says, also where XLA could do without.
OPTIONS = {"xla_allow_excess_precision": False}


class Precision(NamedTuple):
    """A policy, a loss scale, and what the loss and the optimizer's steps are multiplied by."""

    policy: str
    loss_scale: Any
    loss_weight: float = 1.0
    step_size: float = 1.0


def dynamic(loss_weight: float = 1.0) -> jmpp.DynamicLossScale:
    """The default scale and ceiling, for a loss of this weight."""
    return jmpp.DynamicLossScale(
        2.0**16 / loss_weight, growth_interval=GROWTH_INTERVAL, max_loss_scale=2.0**24 / loss_weight
    )


NONE = jmpp.NoOpLossScale()
BASE, CONTROL = "float32", "float32, half the learning rate"
PRECISIONS = {
    BASE: Precision("float32", NONE),
    CONTROL: Precision("float32", NONE, step_size=0.5),
    "bfloat16": Precision("mixed_bfloat16", NONE),
    "float16": Precision("mixed_float16", dynamic()),
    "float16, small loss": Precision("mixed_float16", dynamic(SMALL), SMALL),
    "float16 unscaled": Precision("mixed_float16", NONE),
    "float16 unscaled, small loss": Precision("mixed_float16", NONE, SMALL),
}


class Split(NamedTuple):
    """Examples and what to say about them, for training and for the test."""

    x: Any
    y: Any
    test_x: Any
    test_y: Any


class Measure(NamedTuple):
    """A number that outputs and targets give."""

    name: str
    of: Callable[[jax.Array, jax.Array], jax.Array]
    more_is_better: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned, and how it is judged; `tested` is the model for the test if it differs."""

    model: nn.Module
    load: Callable[[], Split]
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    measure: Measure
    optimizer: optax.GradientTransformation
    batch: int
    steps: int
    about: str
    tested: nn.Module | None = None

    def measures(self) -> tuple[Measure, Measure]:
        return self.measure, Measure("training loss", self.loss)


class CNN(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not self.train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


class MLP(nn.Module):
    outputs: int
    hidden: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.outputs)(x)


def split(x: Any, y: Any, test: int) -> Split:
    """Always the same examples for the test; over the others, features have mean 0 and deviation 1."""
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    mean, deviation = x[test:].mean(0), x[test:].std(0)
    x = ((x - mean) / np.where(deviation > 0, deviation, 1)).astype(np.float32)
    return Split(x[test:], y[test:], x[:test], y[:test])


def digits() -> Split:
    data = datasets.load_digits()
    return split(data.images[..., None], data.target.astype(np.int32), 500)


def cancer() -> Split:
    data = datasets.load_breast_cancer()
    return split(data.data, data.target.astype(np.int32), 169)


def diabetes() -> Split:
    data = datasets.load_diabetes()
    parts = split(data.data, data.target, 142)
    mean, deviation = parts.y.mean(), parts.y.std()
    scaled = [((y - mean) / deviation).astype(np.float32) for y in (parts.y, parts.test_y)]
    return parts._replace(y=scaled[0], test_y=scaled[1])


#: What Python's `help` says of the language. The first nine tenths are for training.
TEXT = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
LENGTH, END = 64, len(TEXT) * 9 // 10


def characters() -> Split:
    """All windows of the text for training and 200 for the test, each with the characters that follow."""
    tokens = np.frombuffer(TEXT, np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view
    train, test = windows(tokens[:END], LENGTH + 1), windows(tokens[END:], LENGTH + 1)
    test = test[:: len(test) // 200][:200]
    return Split(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs.astype(jnp.float32)[:, 0] - targets) ** 2)


def correct(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return 100 * jnp.mean(jnp.argmax(outputs, axis=-1) == targets)


def determination(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """R2: the share of the variance that is explained."""
    return 1 - squared_error(outputs, targets) / jnp.var(targets)


ACCURACY = Measure("test accuracy, %", correct, True)
TASKS = {
    "digits, CNN with BatchNorm": Task(
        CNN(), digits, train_steps.cross_entropy, ACCURACY, optax.sgd(0.05, momentum=0.9), 128, 300,
        "scikit-learn's load_digits: 1297 images of 8 x 8 pixels, and 500 for the test",
        CNN(train=False),
    ),
    "breast cancer, MLP": Task(
        MLP(2), cancer, train_steps.cross_entropy, ACCURACY, optax.sgd(0.02, momentum=0.9), 64, 200,
        "scikit-learn's load_breast_cancer: 400 patients with 30 features, and 169 for the test",
    ),
    "diabetes, MLP regression": Task(
        MLP(1), diabetes, squared_error, Measure("test R2", determination, True),
        optax.sgd(0.01, momentum=0.9), 64, 150,
        "scikit-learn's load_diabetes: 300 patients with 10 features, and 142 for the test",
    ),
    "characters, GPT": Task(
        GPT(128, LENGTH, 64, 4, 256, 2), characters, train_steps.cross_entropy,
        Measure("test bits per character", lambda *of: train_steps.cross_entropy(*of) / jnp.log(2.0)),
        optax.adam(2e-3), 16, 500,
        f"Python's pydoc_data.topics in ASCII (SHA-256 {hashlib.sha256(TEXT).hexdigest()}): the first {END} "
        f"characters, and from the {len(TEXT) - END} others 200 windows of {LENGTH} for the test",
    ),
}  # fmt: skip


def count_zeros() -> optax.GradientTransformation:
    """Leaves gradients as they are, and sums over the steps the share of them that is 0."""

    def update(updates: Any, state: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
        flat = jnp.concatenate([x.ravel() for x in jax.tree.leaves(updates)])
        return updates, state + jnp.mean(flat == 0)

    return optax.GradientTransformation(lambda _: jnp.float32(0), update)


def batches(examples: int, batch: int, steps: int, seed: int) -> np.ndarray:
    """Which examples each step sees; in an epoch none comes twice."""
    rng = np.random.default_rng(seed)
    each = examples // batch
    epochs = [rng.permutation(examples)[: each * batch] for _ in range(-(-steps // each))]
    return np.concatenate(epochs)[: steps * batch].reshape(steps, batch)


def over_seeds(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return jax.jit(jax.vmap(function), compiler_options=OPTIONS, **options)


def train(
    task: Task, precision: Precision, seeds: Sequence[int], steps: int | None = None
) -> dict[str, np.ndarray]:
    """Trains all seeds at once: measures, "skipped" steps, the share of "zero gradients" in the others."""
    steps, data, weight = steps or task.steps, task.load(), precision.loss_weight
    model, tested = (jmpp.wrap(m, precision.policy) for m in (task.model, task.tested or task.model))
    optimizer = optax.chain(
        count_zeros(), optax.scale(1 / weight), task.optimizer, optax.scale(precision.step_size)
    )
    tx = jmpp.loss_scaled(optimizer, precision.loss_scale)

    def judge(state: train_steps.State) -> dict[str, jax.Array]:
        variables = {"params": state.params} | ({"batch_stats": state.stats} if state.stats else {})
        some = slice(None, None, max(len(data.x) // 300, 1))
        sets = (data.test_x, data.test_y), (data.x[some], data.y[some])
        found = {
            measure.name: measure.of(tested.apply(variables, x), y)
            for measure, (x, y) in zip(task.measures(), sets, strict=True)
        }
        skipped = jmpp.metrics(state.opt_state)["skipped_steps"]
        zeros = state.opt_state.inner_state[0] / jnp.maximum(steps - skipped, 1)
        return found | {"skipped": skipped, "zero gradients": zeros}

    step = train_steps.library_step(model, tx, lambda outputs, targets: weight * task.loss(outputs, targets))
    step = over_seeds(step, donate_argnums=0)
    start = functools.partial(train_steps.init, task.model, tx, (data.x[:1],), ())
    state = over_seeds(start)(jnp.stack([jax.random.key(seed) for seed in seeds]))
    order = np.stack([batches(len(data.x), task.batch, steps, seed) for seed in seeds], axis=1)
    for chosen in order:
        state, _ = step(state, (data.x[chosen], data.y[chosen]))
    return {name: np.asarray(x, np.float64) for name, x in over_seeds(judge)(state).items()}


def compare(base: np.ndarray, other: np.ndarray, more_is_better: bool) -> dict[str, Any]:
    """Another precision's results against those of float32, seed by seed.

    The mean difference and its interval by Student's t; `margin`, one standard deviation of float32 over the
    seeds; whether zero lies in the interval, and the whole interval within the margin. The `verdict` is
    "parity" where the mean difference is within the margin: another precision moves the result no more than
    another seed. Else it is "worse" or "better", or "unclear" where zero lies in the interval.
    """
    margin = float(base.std(ddof=1))
    if not np.isfinite(other).all():
        return {"margin": margin, "verdict": "worse"}
    difference = other - base
    mean, error = float(difference.mean()), float(difference.std(ddof=1)) / len(difference) ** 0.5
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(difference) - 1)) * error
    low, high = mean - half, mean + half
    if abs(mean) <= margin:
        verdict = "parity"
    elif low <= 0 <= high:
        verdict = "unclear"
    else:
        verdict = "better" if (mean > 0) == more_is_better else "worse"
    return {
        "difference": mean,
        "interval": [low, high],
        "margin": margin,
        "zero inside": low <= 0 <= high,
        "interval within margin": max(-low, high) <= margin,
        "verdict": verdict,
    }


def rows(
    name: str,
    precisions: Sequence[str] = tuple(PRECISIONS),
    seeds: Sequence[int] = SEEDS,
    steps: int | None = None,
) -> list[dict[str, Any]]:
    """A row per measure of a task and precision, of which float32 is one."""
    task, rows = TASKS[name], []
    results = {precision: train(task, PRECISIONS[precision], seeds, steps) for precision in precisions}
    for measure, _, more_is_better in task.measures():
        for precision, found in results.items():
            values = found[measure]
            row: dict[str, Any] = {"measure": measure, "precision": precision}
            row |= {"mean": float(values.mean()), "deviation": float(values.std(ddof=1))}
            if precision != BASE:
                row |= compare(results[BASE][measure], values, more_is_better)
            row |= {key: float(found[key].mean()) for key in ("skipped", "zero gradients")}
            rows.append(row | {"values": values.tolist()})
    return rows


ABOUT = {"seeds": list(SEEDS), "confidence": CONFIDENCE, "small_loss": SMALL}
ABOUT["tasks"] = {name: {"data": t.about, "batch": t.batch, "steps": t.steps} for name, t in TASKS.items()}
ABOUT["growth_interval"] = GROWTH_INTERVAL
TABLES = (Table("accuracy", rows, by={"task": TASKS}, about=ABOUT),)
