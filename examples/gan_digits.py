"""Train a GAN on digits in float32 and in float16, with a loss scale for each network and each loss.

Run `python examples/gan_digits.py`: it takes less than a minute on two CPU cores and needs no network. The
generator has one loss and one scale. The critic has two losses of different size, and a scale for each: what
it says of images, and a penalty on its slope, which is the gradient of a gradient.
"""

import sys
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import Arguments, finish, progress_bar
from digits import load
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.neural_network import MLPClassifier

import jmp_policy as jmpp

BATCH_SIZE = 128
LATENT = 16
PENALTY = 0.5  # The weight of the penalty is half of it, as usual for R1.
MARGIN = 0.1  # The distance of a GAN that never draws one of the digits is larger by 0.15 at least.

# Growing every 50 clean steps is too eager for real training (the default is 2000); here it lets you see each
# scale climb until its own loss overflows.
DYNAMIC = jmpp.DynamicLossScale(2.0**10, growth_interval=50)
# The critic's slope is a gradient too, computed in float16 inside the penalty, and has a scale of its own.
# That is the first number of its backward pass: of float16, which ends at 2**16, 2**8 leaves room above.
RUNS = {
    "float32": ("float32", jmpp.NoOpLossScale(), jmpp.NoOpLossScale()),
    "float16": ("mixed_float16", DYNAMIC, jmpp.StaticLossScale(2.0**8)),
}
State = namedtuple("State", "generator critic generator_opt critic_opt average")
Row = namedtuple("Row", "name distance images history")  # history: arrays, one value a step


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        for features in (128, 256):
            z = nn.relu(nn.LayerNorm()(nn.Dense(features)(z)))
        return nn.sigmoid(nn.Dense(64)(z))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (256, 128):
            x = nn.leaky_relu(nn.Dense(features)(x), 0.2)
        return nn.Dense(1)(x)[..., 0]


class Gan:
    """Both networks under one policy, each with its optimizer, and a train step."""

    def __init__(self, policy: str, scale: Any, inner_scale: Any):
        self.generator, self.critic = jmpp.wrap(Generator(), policy), jmpp.wrap(Critic(), policy)
        self.inner_scale = inner_scale
        adam = optax.adam(1e-3, b1=0.0, b2=0.99)
        self.generator_tx = jmpp.loss_scaled(adam, scale)
        self.critic_tx = jmpp.loss_scaled(adam, {"images": scale, "penalty": scale})

    def init(self, key: jax.Array) -> State:
        generator = self.generator.init(key, jnp.zeros((1, LATENT)))
        critic = self.critic.init(jax.random.fold_in(key, 1), jnp.zeros((1, 64)))
        opts = self.generator_tx.init(generator), self.critic_tx.init(critic)
        return State(generator, critic, *opts, jax.tree.map(jnp.copy, generator))

    def step(self, state: State, real: jax.Array, key: jax.Array) -> tuple[State, dict]:
        """One step of the critic, then one of the generator."""
        z = jax.random.normal(key, (2, len(real), LATENT))
        fake = self.generator.apply(state.generator, z[0])

        def images(critic: Any) -> jax.Array:
            says = partial(self.critic.apply, critic)
            return jnp.mean(nn.softplus(-says(real)) + nn.softplus(says(fake)))

        def penalty(critic: Any) -> jax.Array:
            def says(x: jax.Array) -> jax.Array:
                return self.critic.apply(critic, x).sum()

            _, slope = jmpp.scaled_value_and_grad(says)(self.inner_scale, real)
            slope = self.inner_scale.unscale(slope)
            return PENALTY / 2 * jnp.mean(jnp.sum(slope**2, axis=-1))

        losses = {"images": images, "penalty": penalty}
        found = {
            name: jmpp.scaled_value_and_grad(loss, loss=name)(state.critic_opt, state.critic)
            for name, loss in losses.items()
        }
        grads = {name: of_loss for name, (_, of_loss) in found.items()}  # each with its own scale
        updates, critic_opt = self.critic_tx.update(grads, state.critic_opt, state.critic)
        critic = optax.apply_updates(state.critic, updates)

        def deception(generator: Any) -> jax.Array:
            return nn.softplus(-self.critic.apply(critic, self.generator.apply(generator, z[1]))).mean()

        loss, grads = jmpp.scaled_value_and_grad(deception)(state.generator_opt, state.generator)
        updates, generator_opt = self.generator_tx.update(grads, state.generator_opt, state.generator)
        generator = optax.apply_updates(state.generator, updates)
        average = optax.incremental_update(generator, state.average, 0.01)

        seen = {"generator loss": loss} | {f"{name} loss": value for name, (value, _) in found.items()}
        seen |= {f"generator/{name}": value for name, value in jmpp.metrics(generator_opt).items()}
        seen |= {f"critic/{name}": value for name, value in jmpp.metrics(critic_opt).items()}
        return State(generator, critic, generator_opt, critic_opt, average), seen


def features_of(images: np.ndarray, labels: np.ndarray, seed: int) -> Any:
    """What a classifier of real digits has in its hidden layer, as a function of images."""
    classifier = MLPClassifier((32,), max_iter=300, random_state=seed, early_stopping=True)
    classifier.fit(images, labels)
    weights, bias = classifier.coefs_[0], classifier.intercepts_[0]
    return lambda x: np.maximum(np.asarray(x, np.float64) @ weights + bias, 0)


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Between normal distributions with the mean and covariance of two samples; rows are the examples."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return np.nan
    values, vectors = np.linalg.eigh(np.cov(a.T))
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    cross = np.linalg.eigvalsh(root @ np.cov(b.T) @ root)
    means = np.sum((a.mean(axis=0) - b.mean(axis=0)) ** 2)
    return float(means + np.trace(np.cov(a.T) + np.cov(b.T)) - 2 * np.sqrt(np.maximum(cross, 0)).sum())


def train(name: str, steps: int, seed: int, progress: Progress) -> Row:
    """Trains in one of the precisions of RUNS, from the same weights and on the same batches in each."""
    gan = Gan(*RUNS[name])
    rng = np.random.default_rng(seed)
    data = load(rng)
    images, test_images = data.images.reshape(-1, 64), data.test_images.reshape(-1, 64)
    key = jax.random.key(seed)
    state = jax.jit(gan.init)(key)
    step = jax.jit(gan.step, donate_argnums=0)
    history = []
    for number in progress.track(range(steps), description=f"{name:16}"):
        batch = rng.choice(len(images), BATCH_SIZE, replace=False)
        state, seen = step(state, images[batch], jax.random.fold_in(key, number))
        history.append(seen)

    z = jax.random.normal(jax.random.fold_in(key, steps), (2000, LATENT))
    generated = np.asarray(jax.jit(gan.generator.apply)(state.average, z))
    features = features_of(images, data.labels, seed)
    distance = frechet_distance(features(test_images), features(generated))
    return Row(name, distance, generated, jax.tree.map(lambda *x: np.array(x), *history))


def table(rows: list[Row]) -> Table:
    heads = "distance to\nreal digits", "network", "loss", "final loss", "loss\nscale", "skipped\nsteps"
    result = Table("precision", *heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        for network, loss in (("generator", ""), ("critic", "images"), ("critic", "penalty")):
            first = network == "generator"
            scale = row.history[f"{network}/loss_scale{loss and '/' + loss}"][-1]
            skipped = f"{row.history[f'{network}/skipped_steps'][-1]}" if loss != "penalty" else ""
            final = f"{row.history[f'{loss or network} loss'][-50:].mean():.4f}"
            names = (row.name, f"{row.distance:.2f}") if first else ("", "")
            result.add_row(*names, network, loss, final, f"2^{np.log2(scale):.0f}", skipped)
    for column in (result.columns[1], *result.columns[4:]):
        column.justify = "right"
    return result


def plot(rows: list[Row], path: Path) -> None:
    """Real digits beside generated ones, 6 x 6 of each."""
    real = load(np.random.default_rng(0)).test_images
    panels = {"real": real} | {row.name: row.images for row in rows}
    figure = Figure(figsize=(3 * len(panels), 3.4), layout="constrained")
    for axes, (name, images) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        grid = np.pad(np.reshape(images[:36], (6, 6, 8, 8)), ((0, 0), (0, 0), (1, 1), (1, 1)))
        axes.imshow(grid.transpose(0, 2, 1, 3).reshape(60, 60), cmap="gray", vmin=0, vmax=1)
        axes.set_title(name)
        axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def judge(rows: list[Row]) -> str | None:
    """Why the comparison failed, or None: float16 must draw about as well as float32."""
    full, half = (next(row.distance for row in rows if row.name == name) for name in ("float32", "float16"))
    if half <= full + MARGIN:
        return None
    return (
        f"the digits of float16 are {half:.2f} away from real ones, more than {MARGIN} further than those of "
        f"float32 ({full:.2f})"
    )


ABOUT = """
A GAN draws 8 x 8 digits twice: same weights, same batches, same train step. The
generator and the critic have an optimizer each, and the critic has two losses;
each of the three losses has a loss scale of its own.
"""
CAPTION = """\
distance:   Frechet distance in the hidden layer of a classifier of real digits.
            Among real digits it is 0.05; if one of ten is never drawn, 0.2 to
            0.35; of noise, 10 and more.
final loss: mean of the last 50 steps"""


def compare(steps: int, seed: int, out: Path, quiet: bool = False) -> list[Row]:
    """Trains all of RUNS, prints the table and saves the images."""
    console = Console(highlight=False)
    if not quiet:
        console.print(ABOUT)
    with progress_bar(console, quiet) as progress:
        rows = [train(name, steps, seed, progress) for name in RUNS]
    console.print(table(rows))
    if not quiet:
        console.print(CAPTION)
    plot(rows, out)
    console.print(f"\nReal and generated digits: {out}", soft_wrap=True, markup=False)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = Arguments("Train a GAN on digits in two precisions, and compare.", steps=2000)
    default = Path(__file__).parent / "out" / "gan_digits.png"
    parser.add_argument("--out", type=Path, default=default, help="the images")
    return finish(judge(compare(**vars(parser.parse_args(argv)))))


if __name__ == "__main__":
    sys.exit(main())
