"""Train an image classifier with BatchNorm, its weights and batches sharded over eight devices (FSDP).

Run `python examples/image_classifier.py --precision fp16`. It takes about a minute on two CPU cores and needs
no network. Stop it and run it again: it goes on where the last checkpoint was. `--config` reads settings from
a file, such as `{"precision": {"policy": "bf16", "rules": [["head", "fp32"]]}, "steps": 200}`.

`jmp_policy.linen.TrainState` holds model, optimizer and loss scale. On a skipped step it keeps the batch
statistics, too, on all devices.
"""

import sys
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from _run import finish
from _train import history, judged, parse, plot, train
from data_parallel import find_devices, placement
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp

DEFAULTS = {
    "precision": "fp16", "steps": 150, "seed": 0, "devices": 8, "batch": 128, "width": 32,
    "learning_rate": 3e-3, "out": "examples/out/image_classifier",
}  # fmt: skip

#: Of the images that were not trained on.
LEAST_ACCURACY = 0.8


class Block(nn.Module):
    """Two convolutions with BatchNorm and a shortcut, as in ResNet."""

    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.Conv(self.width, (3, 3), strides=self.stride, use_bias=False, name="conv_0")(x)
        y = nn.relu(norm(name="norm_0")(y))
        y = norm(name="norm_1")(nn.Conv(self.width, (3, 3), use_bias=False, name="conv_1")(y))
        if x.shape != y.shape:
            x = nn.Conv(self.width, (1, 1), strides=self.stride, use_bias=False, name="shortcut")(x)
        return nn.relu(x + y)


class Classifier(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = Block(self.width, name="block_0")(x, train)
        x = Block(2 * self.width, stride=2, name="block_1")(x, train)
        return nn.Dense(10, name="head")(x.mean((1, 2)))


class TrainState(jmpp.linen.TrainState):
    batch_stats: Any


def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, dict[str, Any]]:
    """One step. It does not know how many devices there are."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, images, train=True, mutable="batch_stats")
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new["batch_stats"]

    (loss, batch_stats), grads = state.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    return state, {"loss": loss, **jmpp.metrics(state.opt_state)}


def run(options: Any) -> float:
    """Trains, draws the picture, and returns the accuracy on images that were not trained on."""
    devices = find_devices(options.devices)
    from digits import load  # Not above: its loss scale is on a device before they are chosen.

    data = load(np.random.default_rng(options.seed))
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    model = Classifier(options.width)

    def init(key: jax.Array) -> TrainState:
        variables = model.init(key, data.images[:1], train=False)
        return TrainState.create(
            apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"],
            tx=optax.adamw(options.learning_rate), precision=options.precision,
        )  # fmt: skip

    # Parameters, moments and statistics are sharded where they are made, and stay where they are.
    places = jax.tree.map(partial(placement, mesh), jax.eval_shape(init, jax.random.key(options.seed)))
    state = jax.jit(init, out_shardings=places)(jax.random.key(options.seed))
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(places, None))
    rows = NamedSharding(mesh, P("data"))

    def numbered(state: TrainState, number: int) -> tuple[TrainState, dict[str, Any]]:
        batch = np.random.default_rng([options.seed, number]).choice(len(data.images), options.batch)
        return step(state, *jax.device_put((data.images[batch], data.labels[batch]), rows))

    state = train(options, state, numbered, name="image classifier")
    plot(options, f"digits on {len(devices)} devices, {options.precision.policy.default}")
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = jax.jit(partial(state.apply_fn, train=False))(variables, data.test_images)
    return float(np.mean(np.argmax(logits, -1) == data.test_labels))


def main(argv: list[str] | None = None) -> int:
    options = parse("Train a classifier with BatchNorm on sharded devices.", DEFAULTS, argv)
    accuracy = run(options)
    last = {name: values[-1] for name, values in history(options).items()}
    print(f"{accuracy:.1%} of the test images are right; loss {last['loss']:.4f}, loss scale "
          f"{last['loss_scale']:g}, {last['skipped_steps']:g} steps skipped")  # fmt: skip
    return finish(
        judged(options, 0.5) or (None if accuracy > LEAST_ACCURACY else f"only {accuracy:.1%} are right")
    )


if __name__ == "__main__":
    sys.exit(main())
