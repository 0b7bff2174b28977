"""Train in float16 with weights and batches sharded over eight devices (FSDP), and on one with the same code.

Run `python examples/data_parallel.py`: it takes less than a minute on two CPU cores and needs no network.
Where there are fewer devices than `--devices`, the CPU shows itself as so many. The train step doesn't know
how many there are: what makes it one for many is where its arguments lie, marked (1), (2) and (3). What the
devices send is read from the compiled program.
"""

import os
import re
import sys
from collections import Counter, namedtuple
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from _run import Arguments, finish, progress_bar
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jmp_policy as jmpp

# The devices gather weights that are float16 already: cast first, sent afterwards. With "grad" the gradients
# of weights leave the float16 products as float32, and the devices sum them up in float32. Without, the sum
# is one in float16, and overflows earlier.
FLOAT16 = "params=float32,compute=float16,output=float32,grad=float32"
HALF_SUMS = "params=float32,compute=float16,output=float32"
# For each run its policy, and whether it has all the devices or one.
RUNS = {
    "float32": ("float32", True),
    "float16": (FLOAT16, True),
    "float16 sums": (HALF_SUMS, True),
    "float16, alone": (FLOAT16, False),
}
# The scale starts so high that the first steps overflow, for all devices or none. Growing every 50 clean
# steps is too eager for real training (the default is 2000), but shows more of it.
SCALE, GROWTH_INTERVAL = 2.0**24, 50
BATCH_SIZE = 128
State = namedtuple("State", "params batch_stats opt_state")
Row = namedtuple("Row", "name devices accuracy history param_bytes sent")  # sent: bytes by operation, dtype


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = x.reshape(len(x), -1)
        for features in (256, 256):
            x = nn.Dense(features, use_bias=False)(x)
            if train:
                # Left to itself, XLA may gather these instead of the weights, where they are smaller.
                x = jax.lax.with_sharding_constraint(x, P("data"))
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x)


def train_step(model: nn.Module, tx: Any, state: State, images: Any, labels: Any) -> tuple[State, dict]:
    """One step, the same for any number of devices."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = model.apply(variables, images, train=True, mutable="batch_stats")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), new["batch_stats"]

    value_and_grad = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)
    (loss, batch_stats), grads = value_and_grad(state.opt_state, state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    # Statistics of the whole batch. Where one device overflows, all keep those they had.
    batch_stats = jmpp.select_tree(jmpp.grads_finite(opt_state), batch_stats, state.batch_stats)
    return State(params, batch_stats, opt_state), {"loss": loss} | jmpp.metrics(opt_state)


def placement(mesh: Mesh, leaf: Any) -> NamedSharding:
    """An array's largest axis that the devices divide is sharded over them; without one each has it all."""
    sizes = [size if size % mesh.size == 0 else 0 for size in leaf.shape]
    axis = int(np.argmax(sizes)) if any(sizes) else None
    return NamedSharding(mesh, P() if axis is None else P(*[None] * axis, "data"))


def collectives(program: str) -> Counter:
    """How many bytes each device gets from the collectives of a compiled program without loops."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = Counter()
    for types, name in re.findall(rf"= (\S+|\(.*?\)) ({names})(?:-done)?\(", program):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
            size = int(np.prod([int(n) for n in shape.split(",") if n], dtype=int))
            found[name, dtype] += size * max(int(dtype.strip("abcdefpru")[:2] or 8) // 8, 1)
    return found


def train(name: str, data: Any, devices: list, steps: int, seed: int, progress: Progress) -> Row:
    """Trains on the devices in one of RUNS, from the same weights and on the same batches in each."""
    policy, on_all = RUNS[name]
    mesh = Mesh(np.array(devices if on_all else devices[:1]), ("data",), axis_types=(AxisType.Auto,))
    model = jmpp.wrap(Net(), policy)
    scale = jmpp.DynamicLossScale(SCALE, growth_interval=GROWTH_INTERVAL)
    tx = jmpp.loss_scaled(optax.adam(1e-3), scale)

    def init(key: jax.Array) -> State:
        variables = model.init(key, data.images[:1], train=False)
        return State(**variables, opt_state=tx.init(variables["params"]))

    # (1) Weights and moments are sharded where they are made: no device ever holds all of them.
    key = jax.random.key(seed)
    places = jax.tree.map(partial(placement, mesh), jax.eval_shape(init, key))
    state = jax.jit(init, out_shardings=places)(key)
    # (2) After a step they lie where they lay before.
    step = jax.jit(partial(train_step, model, tx), donate_argnums=0, out_shardings=(places, None))
    # (3) Each device gets its part of the batch.
    place = partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        step = step.lower(state, place(data.images[:BATCH_SIZE]), place(data.labels[:BATCH_SIZE])).compile()
    rng, history = np.random.default_rng(seed), []
    for _ in progress.track(range(steps), description=f"{name:14}"):
        batch = rng.choice(len(data.images), BATCH_SIZE, replace=False)
        state, seen = step(state, place(data.images[batch]), place(data.labels[batch]))
        history.append(jax.device_get(seen))

    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = jax.jit(partial(model.apply, train=False))(variables, data.test_images)
    accuracy = float(np.mean(np.argmax(logits, axis=-1) == data.test_labels))
    param_bytes = sum(p.addressable_data(0).nbytes for p in jax.tree.leaves(state.params))
    history = jax.tree.map(lambda *x: np.array(x), *history)
    return Row(name, mesh.size, accuracy, history, param_bytes, collectives(step.as_text()))


def tables(rows: list[Row]) -> tuple[Table, Table]:
    """What was learned, and what was kept and sent for it."""
    heads = "devices", "test acc.", "final loss", "loss scale", "skipped steps"
    learned = Table("run", *heads, box=box.SIMPLE_HEAD, pad_edge=False)
    heads = (
        "weights kept",
        "gathered float32",
        "gathered float16",
        "summed float32",
        "summed float16",
        "decided",
    )
    sent = Table("run", *(head.replace(" ", "\n") for head in heads), box=box.SIMPLE_HEAD, pad_edge=False)
    sums = "all-reduce", "reduce-scatter"
    for row in rows:
        loss, scale = row.history["loss"][-20:].mean(), np.log2(row.history["loss_scale"][-1])
        skipped = f"{row.history['skipped_steps'][-1]}"
        learned.add_row(
            row.name, f"{row.devices}", f"{row.accuracy:.1%}", f"{loss:.4f}", f"2^{scale:.0f}", skipped
        )
        sizes = [row.param_bytes]
        for operations in (["all-gather"], sums):
            sizes += [sum(row.sent[name, dtype] for name in operations) for dtype in ("f32", "f16")]
        decided = f"{row.sent['all-reduce', 'pred']} B"
        sent.add_row(row.name, *(f"{size / 2**10:.0f} KiB" for size in sizes), decided)
    for column in learned.columns[1:] + sent.columns[1:]:
        column.justify = "right"
    return learned, sent


def judge(rows: list[Row]) -> str | None:
    """Why the comparison failed, or None: many devices must learn what one does."""
    one = next(row.accuracy for row in rows if row.name == "float16, alone")
    for row in rows:
        if not abs(row.accuracy - one) <= 0.01 + 1e-9:
            return f"{row.name} on {row.devices} devices reached {row.accuracy:.1%}, and one device {one:.1%}"
    return None


ABOUT = """
A network with BatchNorm learns to read 8 x 8 digits, with each of its weights
and its batches sharded over {} devices; and, with the same train step, on one.
"""
CAPTION = """\
weights kept: by each device, float32 in every run
gathered:     in one step, the weights; in float32 also what BatchNorm has
summed:       in one step, the gradients, as compiled for this backend: {}
decided:      with a boolean for each array, whether all gradients are finite"""


def compare(devices: list, steps: int, seed: int, quiet: bool = False) -> list[Row]:
    """Trains all of RUNS and prints the table."""
    from digits import load  # Not above: its loss scale is on a device before they are chosen.

    console = Console(highlight=False)
    if not quiet:
        console.print(ABOUT.format(len(devices)))
    data = load(np.random.default_rng(seed))
    with progress_bar(console, quiet) as progress:
        rows = [train(name, data, devices, steps, seed, progress) for name in RUNS]
    for table in tables(rows):
        console.print(table)
    if not quiet:
        console.print(CAPTION.format(devices[0].platform))
    return rows


def find_devices(count: int) -> list:
    """So many devices; of the CPU, which can show itself as any number before JAX is first used."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
    return (jax.devices() if len(jax.devices()) >= count else jax.devices("cpu"))[:count]


def main(argv: list[str] | None = None) -> int:
    parser = Arguments("Train sharded over several devices and on one, and compare.", steps=300)
    parser.add_argument("--devices", type=int, default=8, help="how many; they divide 128 (default: 8)")
    options = parser.parse_args(argv)
    if options.devices < 1 or BATCH_SIZE % options.devices:
        parser.error(f"--devices must divide the batch of {BATCH_SIZE}, got {options.devices}")
    devices = find_devices(options.devices)
    if len(devices) < options.devices:
        parser.error(f"--devices {options.devices}: XLA_FLAGS has the CPU show itself as {len(devices)}")
    return finish(judge(compare(devices, options.steps, options.seed, options.quiet)))


if __name__ == "__main__":
    sys.exit(main())
