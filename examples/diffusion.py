"""Train a diffusion model under the wrong policy and the right one, and see the difference.

Run `python examples/diffusion.py --precision bf16`: about a minute on two CPU cores, no network. The model is
that of Karras et al. (2022), on points of a spiral. Its output is `c_skip * x + c_out * network(...)`. At the
lowest noise level c_out is 0.002, and what the network adds is smaller than what bfloat16 rounds off x. So a
model that casts its inputs to bfloat16 is spoilt. No number is infinite or NaN, and the training loss looks
the same: only the loss at low noise shows it.

A policy rounds inputs where products read them: the network, which is all of the work, is half, and the sum
around it float32.
"""

import argparse
import sys
from collections import namedtuple
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import finish
from _train import judged, parse, plot, train

import jmp_policy as jmpp

DEFAULTS = {
    "precision": "bf16", "steps": 300, "seed": 0, "features": 128, "layers": 3, "batch": 512,
    "learning_rate": 2e-3, "out": "examples/out/diffusion",
}  # fmt: skip
SIGMA_DATA = 0.5
#: The lowest noise level of the published sampler, and more.
NOISE_LEVELS = (0.002, 0.01, 0.05, 0.3, 1.0)
#: The least loss at the lowest noise level that counts as a difference from float32.
MARGIN = 0.02
Row = namedtuple("Row", "name losses samples")


class Network(nn.Module):
    features: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array, noise: jax.Array) -> jax.Array:
        angles = noise[:, None] * jnp.exp(jnp.linspace(0, 3, 16))
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        h = nn.Dense(self.features, name="x")(x) + nn.Dense(self.features, name="noise")(waves)
        for layer in range(self.layers):
            h = h + nn.Dense(self.features, name=f"layer_{layer}")(nn.silu(h))
        return nn.Dense(x.shape[-1], name="out")(nn.silu(h))


class Denoiser(nn.Module):
    features: int
    layers: int
    inputs: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, sigma: jax.Array) -> jax.Array:
        # A cast that XLA cannot leave out, as it does on CPUs where the next operation is in float32.
        bits = jnp.finfo(self.inputs)
        x = jax.lax.reduce_precision(x, bits.nexp, bits.nmant)
        s = sigma[:, None]
        root = jnp.sqrt(s**2 + SIGMA_DATA**2)
        c_skip, c_out = (SIGMA_DATA / root) ** 2, s * SIGMA_DATA / root
        return c_skip * x + c_out * Network(self.features, self.layers, name="network")(
            x / root, jnp.log(sigma) / 4
        )


def spiral(key: jax.Array, n: int) -> jax.Array:
    """Points on a spiral, with a little noise across it."""
    along, across = jax.random.split(key)
    angle = jax.random.uniform(along, (n,), minval=1.5, maxval=4.5) * jnp.pi
    points = jnp.stack([angle * jnp.cos(angle), angle * jnp.sin(angle)], axis=-1) / 20
    return points + 0.005 * jax.random.normal(across, (n, 2))


def denoising_loss(model: nn.Module, params: Any, key: jax.Array, n: int, sigma: float | None = None) -> Any:
    """The weighted loss: 1 for a model that returns its input at low noise.

    Args:
      model: the denoiser.
      params: its parameters.
      key: of data and noise.
      n: points.
      sigma: one noise level for all; by default they are drawn as in training.
    """
    data, levels, noise = jax.random.split(key, 3)
    x = spiral(data, n)
    drawn = jnp.exp(-1.2 + 1.2 * jax.random.normal(levels, (n,)))
    sigmas = drawn if sigma is None else jnp.full((n,), sigma)
    noisy = x + sigmas[:, None] * jax.random.normal(noise, x.shape)
    weight = (sigmas**2 + SIGMA_DATA**2) / (sigmas * SIGMA_DATA) ** 2
    return (weight[:, None] * (model.apply({"params": params}, noisy, sigmas) - x) ** 2).mean()


def sample(model: nn.Module, params: Any, key: jax.Array, n: int = 2000, steps: int = 24) -> jax.Array:
    """Points drawn from the model by Euler's method, from noise level 2 down to 0.002."""
    ramp = jnp.linspace(2.0 ** (1 / 7), 0.002 ** (1 / 7), steps) ** 7
    levels = jnp.append(ramp, 0.0)

    def step(x: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        now, after = pair
        clean = model.apply({"params": params}, x, jnp.full((n,), now))
        return clean + (after / now) * (x - clean), None

    return jax.lax.scan(step, levels[0] * jax.random.normal(key, (n, 2)), (levels[:-1], levels[1:]))[0]


def runs(precision: jmpp.Precision) -> dict[str, tuple[jmpp.Precision, Any]]:
    """The three runs, with the dtypes of the model's inputs: float32, all in half, and half in products."""
    half = precision.policy.default.compute_dtype
    return {
        "float32": (jmpp.Precision("float32"), jnp.float32),
        "all in half": (precision, half),
        "mixed": (precision, jnp.float32),
    }


def run(name: str, precision: jmpp.Precision, inputs: Any, options: Any) -> Row:
    """Trains one of the runs; returns its losses by noise level, and points drawn from it."""
    options = argparse.Namespace(**vars(options) | {"out": options.out / name.replace(" ", "_")})
    model = precision.wrap(Denoiser(options.features, options.layers, inputs))
    tx = precision.loss_scaled(optax.adam(options.learning_rate))
    loss_fn = partial(denoising_loss, model)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, number: Any) -> tuple[Any, dict[str, Any]]:
        params, opt_state = state
        key = jax.random.fold_in(jax.random.key(options.seed), number)
        loss, grads = jmpp.scaled_value_and_grad(loss_fn)(opt_state, params, key, options.batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **jmpp.metrics(opt_state)}

    params = jax.jit(model.init)(jax.random.key(options.seed), jnp.ones((1, 2)), jnp.ones(1))["params"]
    params, _ = train(options, (params, tx.init(params)), step, name=name)
    if failure := judged(options, 0.98):
        raise SystemExit(f"{name}: {failure}")
    evaluated = jax.jit(loss_fn, static_argnums=2)
    key = jax.random.key(options.seed + 1)
    losses = {sigma: float(evaluated(params, key, 4096, sigma)) for sigma in NOISE_LEVELS}
    points = np.asarray(jax.jit(partial(sample, model))(params, key))

    def draw(axes: Any) -> None:
        axes.plot(*points.T, ".", markersize=1.5, color="#0072B2")
        axes.set(title="points drawn from the model", aspect="equal", xlim=(-0.8, 0.8), ylim=(-0.8, 0.8))

    plot(options, f"denoising a spiral: {name}", draw)
    return Row(name, losses, points)


def judge(rows: list[Row]) -> str | None:
    """Why the comparison failed, or None: inputs in half must show at low noise, and mixed precision not."""
    plain, half, mixed = (row.losses[NOISE_LEVELS[0]] for row in rows)
    if not half > plain + MARGIN:
        return f"all in half has a loss of {half:.3f} at low noise, no more than float32 ({plain:.3f})"
    if not mixed < plain + MARGIN / 2:
        return f"in mixed precision the loss at low noise is {mixed:.3f}, and in float32 {plain:.3f}"
    return None


def main(argv: list[str] | None = None) -> int:
    options = parse("Train a diffusion model under the wrong policy and the right one.", DEFAULTS, argv)
    rows = [run(name, *how, options) for name, how in runs(options.precision).items()]
    print("loss at noise level " + "".join(f"{sigma:>9g}" for sigma in NOISE_LEVELS))
    for row in rows:
        print(f"{row.name:20}" + "".join(f"{row.losses[sigma]:9.3f}" for sigma in NOISE_LEVELS))
    return finish(judge(rows))


if __name__ == "__main__":
    sys.exit(main())
