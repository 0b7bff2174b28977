"""Does half precision learn what float32 learns? Small tasks whose data is there without a network.

`python -m benchmarks.accuracy` trains every task from five seeds in each precision. A seed gives the initial
values and the order of the batches, the same ones in every precision; the split into training and test data
is fixed. So the difference between two precisions is taken seed by seed.

What float16 cannot do without loss scaling shows when the loss is small: some runs minimise 2**-24 times it,
as happens to one term of a weighted loss. The optimizer divides by the weight, a power of two, which float32
cannot tell. Gradients below 2**-25 are 0 in float16, and the weight takes most of them there.

The training step, data and all, is `jax.vmap` over the seeds, so each of them has a loss scale of its own and
skips on its own. XLA may leave out pairs of casts that only round; here it may not.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
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
from benchmarks import _record, _steps
from benchmarks.models.gpt import GPT

SEEDS = range(5)
CONFIDENCE = 0.95
SMALL = 2.0**-24
#: The default is 2000, longer than these runs. This way they overflow now and then, and skip.
GROWTH_INTERVAL = 100
#: Rounding as the policy says, also where XLA could do without.
OPTIONS = {"xla_allow_excess_precision": False}


class Precision(NamedTuple):
    """A policy, a loss scale, what the loss is multiplied by, and what the optimizer's steps are."""

    policy: str
    loss_scale: Any
    loss_weight: float = 1.0
    step_size: float = 1.0


def dynamic(loss_weight: float = 1.0) -> jmpp.DynamicLossScale:
    """The default scale for a loss of this weight."""
    return jmpp.DynamicLossScale(
        2.0**16 / loss_weight, growth_interval=GROWTH_INTERVAL, max_loss_scale=2.0**24 / loss_weight
    )


BASE, CONTROL = "float32", "float32, half the learning rate"
PRECISIONS = {
    BASE: Precision("float32", jmpp.NoOpLossScale()),
    CONTROL: Precision("float32", jmpp.NoOpLossScale(), step_size=0.5),
    "bfloat16": Precision("mixed_bfloat16", jmpp.NoOpLossScale()),
    "float16": Precision("mixed_float16", dynamic()),
    "float16, small loss": Precision("mixed_float16", dynamic(SMALL), SMALL),
    "float16 unscaled": Precision("mixed_float16", jmpp.NoOpLossScale()),
    "float16 unscaled, small loss": Precision("mixed_float16", jmpp.NoOpLossScale(), SMALL),
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
    more_is_better: bool


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned, by what, and how it is judged.

    Args:
      model: a Linen module in plain float32 Flax; `tested` is the one for the test if that differs.
      load: the data.
      loss: `(outputs, targets) -> scalar`.
      measure: of the test data, in words, and how.
      optimizer: an optax transformation for the loss as it is.
      batch: examples in a step.
      steps: how many.
      about: the data, in words.
    """

    model: nn.Module
    load: Callable[[], Split]
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    measure: Measure
    optimizer: optax.GradientTransformation
    batch: int
    steps: int
    about: str
    tested: nn.Module | None = None


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
    """The same examples for the test each time; features have mean 0 and deviation 1 over the others."""
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


LENGTH = 64


def text() -> bytes:
    """What Python's `help` knows about the language, in ASCII."""
    return "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")


def characters() -> Split:
    """Windows of text and the characters that follow; the last tenth of it is for the test."""
    tokens = np.frombuffer(text(), np.uint8).astype(np.int32)
    end = len(tokens) * 9 // 10
    windows = np.lib.stride_tricks.sliding_window_view
    train, test = windows(tokens[:end], LENGTH + 1), windows(tokens[end:], LENGTH + 1)
    test = test[:: len(test) // 200]
    return Split(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs.astype(jnp.float32)[:, 0] - targets) ** 2)


def correct(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Percent of right answers."""
    return 100 * jnp.mean(jnp.argmax(outputs, axis=-1) == targets)


def bits(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return _steps.cross_entropy(outputs, targets) / jnp.log(2.0)


def determination(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """R2: the share of the variance that is explained."""
    return 1 - squared_error(outputs, targets) / jnp.var(targets)


ACCURACY = Measure("test accuracy, %", correct, True)
TASKS = {
    "digits, CNN with BatchNorm": Task(
        CNN(), digits, _steps.cross_entropy, ACCURACY, optax.sgd(0.05, momentum=0.9), 128, 300,
        "scikit-learn's load_digits: 1297 images of 8 x 8 pixels and 500 for the test",
        CNN(train=False),
    ),
    "breast cancer, MLP": Task(
        MLP(2), cancer, _steps.cross_entropy, ACCURACY, optax.sgd(0.02, momentum=0.9), 64, 200,
        "scikit-learn's load_breast_cancer: 400 patients with 30 features and 169 for the test",
    ),
    "diabetes, MLP regression": Task(
        MLP(1), diabetes, squared_error, Measure("test R2", determination, True), optax.sgd(0.01, momentum=0.9),
        64, 150, "scikit-learn's load_diabetes: 300 patients with 10 features and 142 for the test",
    ),
    "characters, GPT": Task(
        GPT(128, LENGTH, 64, 4, 256, 2), characters, _steps.cross_entropy,
        Measure("test bits per character", bits, False), optax.adam(2e-3), 16, 500,
        f"Python's pydoc_data.topics in ASCII: {len(text()) * 9 // 10} characters, and of the "
        f"{len(text()) - len(text()) * 9 // 10} that follow 200 windows of {LENGTH} for the test; "
        f"SHA-256 {hashlib.sha256(text()).hexdigest()[:16]}",
    ),
}  # fmt: skip


def count_zeros() -> optax.GradientTransformation:
    """Leaves gradients as they are, and sums over the steps the share of them that is 0."""

    def update(updates: Any, state: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
        flat = jnp.concatenate([x.ravel() for x in jax.tree.leaves(updates)])
        return updates, state + jnp.mean(flat == 0)

    return optax.GradientTransformation(lambda _: jnp.float32(0), update)


def train(task: Task, precision: Precision, seeds: Sequence[int], steps: int | None = None) -> dict[str, Any]:
    """Trains once per seed, all of them at once, and measures on the test data.

    Args:
      task: what to learn.
      precision: what to compute in.
      seeds: of the initial values and the order of the batches.
      steps: instead of the task's own.

    Returns:
      By name: each measure, "skipped" steps, the share of "zero gradients" over all steps that were not
      skipped. Arrays of one number per seed.
    """
    steps, data, weight = steps or task.steps, task.load(), precision.loss_weight
    model = jmpp.wrap(task.model, precision.policy)
    inner = optax.chain(count_zeros(), optax.scale(1 / weight), task.optimizer, optax.scale(precision.step_size))
    tx = jmpp.loss_scaled(inner, precision.loss_scale)

    def start(key: jax.Array) -> _steps.State:
        variables = task.model.init(key, data.x[:1])
        params = variables["params"]
        return _steps.State(params, variables.get("batch_stats", {}), tx.init(params))

    def over_seeds(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return jax.jit(jax.vmap(function), compiler_options=OPTIONS, **options)

    step = _steps.library_step(model, tx, lambda outputs, targets: weight * task.loss(outputs, targets))
    step = over_seeds(step, donate_argnums=0)
    state = over_seeds(start)(jnp.stack([jax.random.key(seed) for seed in seeds]))
    orders = [batches(len(data.x), task.batch, steps, seed) for seed in seeds]
    for chosen in zip(*orders, strict=True):
        chosen = np.stack(chosen)
        state, _ = step(state, (data.x[chosen], data.y[chosen]))

    tested = jmpp.wrap(task.tested or task.model, precision.policy)

    def judge(state: _steps.State) -> dict[str, jax.Array]:
        variables = {"params": state.params, "batch_stats": state.stats}
        outputs = tested.apply({k: v for k, v in variables.items() if v}, data.test_x)
        found = {name: measure.of(outputs, data.test_y) for name, measure in task.measures.items()}
        skipped = jmpp.metrics(state.opt_state)["skipped_steps"]
        zeros = state.opt_state.inner_state[0] / jnp.maximum(steps - skipped, 1)
        return found | {"skipped": skipped, "zero gradients": zeros}

    return {name: np.asarray(x, np.float64) for name, x in over_seeds(judge)(state).items()}


def batches(examples: int, batch: int, steps: int, seed: int) -> list[np.ndarray]:
    """Which examples each step sees; none comes again before every other one came."""
    rng = np.random.default_rng(seed)
    each = examples // batch
    epochs = [rng.permutation(examples)[: each * batch] for _ in range(-(-steps // each))]
    return list(np.concatenate(epochs)[: steps * batch].reshape(steps, batch))


def compare(base: np.ndarray, other: np.ndarray, more_is_better: bool) -> dict[str, Any]:
    """Another precision's results against those of float32, seed by seed.

    Args:
      base, other: one result per seed.
      more_is_better: of the results.

    Returns:
      The mean difference and its interval by Student's t; `margin`, one standard deviation of float32 over
      the seeds; whether zero lies in the interval, and all of the interval within the margin. The
      `verdict` is "parity" where the mean difference is within the margin: changing the precision moves the
      result no more than changing the seed. Else it is "worse" or "better", or "unclear" where the interval
      holds zero.
    """
    difference, margin = other - base, float(base.std(ddof=1))
    if not np.isfinite(other).all():
        return {"margin": margin, "verdict": "worse"}
    mean = float(difference.mean())
    error = float(difference.std(ddof=1)) / len(difference) ** 0.5
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


def rows_of(name: str, task: Task, results: Mapping[str, Mapping[str, np.ndarray]]) -> list[dict[str, Any]]:
    """A row per measure and precision, of what `train` returned for each precision."""
    rows = []
    for measure, (_, more_is_better) in task.measures.items():
        for precision, found in results.items():
            values = found[measure]
            row = {"task": name, "measure": measure, "precision": precision}
            row |= {"mean": float(values.mean()), "deviation": float(values.std(ddof=1))}
            if precision != BASE:
                row |= compare(results[BASE][measure], values, more_is_better)
            row |= {key: float(found[key].mean()) for key in ("skipped", "zero gradients")}
            rows.append(row | {"values": values.tolist()})
    return rows


def run(
    tasks: Sequence[str] = tuple(TASKS),
    precisions: Sequence[str] = tuple(PRECISIONS),
    seeds: Sequence[int] = SEEDS,
    steps: int | None = None,
) -> list[dict[str, Any]]:
    """Rows of the named tasks, in the named precisions, of which float32 is one."""
    rows = []
    for name in tasks:
        results = {
            precision: train(TASKS[name], PRECISIONS[precision], seeds, steps) for precision in precisions
        }
        rows += rows_of(name, TASKS[name], results)
    return rows


def main() -> None:
    about = {name: {"data": t.about, "batch": t.batch, "steps": t.steps} for name, t in TASKS.items()}
    _record.save(
        "accuracy",
        run(),
        tasks=about,
        seeds=list(SEEDS),
        confidence=CONFIDENCE,
        small_loss=SMALL,
        growth_interval=GROWTH_INTERVAL,
        backend=jax.default_backend(),
    )


if __name__ == "__main__":
    main()
