"""Serve a network, trained in float32, with weights and products in half precision: in Linen and in NNX.

Run `python examples/inference.py`: it takes less than a minute on two CPU cores and needs no network. The
`p=` of a policy says what weights are stored in. The lines that serve a trained model in half are marked (1)
and (2), for each of the two libraries. Nothing is scaled: loss scales are for gradients.
"""

import sys
import time
from collections import namedtuple
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import Arguments, finish, progress_bar
from digits import BATCH_SIZE, load
from digits import Net as LinenNet
from flax import nnx
from nnx_digits import Net as NNXNet
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jmp_policy as jmpp

POLICIES = {"float32": "float32", "bfloat16": "p=bf16,c=bf16,o=f32", "float16": "p=f16,c=f16,o=f32"}
LEARNING_RATE, CALLS = 3e-3, 30
# The largest error of a logit, as a share of the largest logit and in units of the dtype's eps. On the way to
# a logit nine values are rounded by half of eps at most (weights and results of three layers, results of two
# norms, the sum with the bias): 4.5 if all went the same way. They go both ways, which comes to 0.4 to 1.2;
# bfloat16 in the place of float16 comes to 3 and more.
LOGIT_ERROR = 2.0
# `predict` is compiled, and takes weights and images; logits are float32's.
Server = namedtuple("Server", "predict weights")
Row = namedtuple("Row", "library name logits param_bytes temp_bytes time")  # time: relative to float32


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Linen:
    def train(self, batches: Any, seed: int) -> None:
        """In float32, with no policy at all."""
        tx = optax.adam(LEARNING_RATE)

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(variables: Any, opt_state: Any, images: Any, labels: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                now = variables | {"params": params}
                logits, new = LinenNet().apply(now, images, train=True, mutable="batch_stats")
                return cross_entropy(logits, labels), new

            grads, new = jax.grad(loss_fn, has_aux=True)(variables["params"])
            updates, opt_state = tx.update(grads, opt_state)
            return new | {"params": optax.apply_updates(variables["params"], updates)}, opt_state

        images = jnp.zeros((1, 8, 8, 1))
        self.variables = jax.jit(partial(LinenNet().init, train=False))(jax.random.key(seed), images)
        opt_state = tx.init(self.variables["params"])
        for images, labels in batches:
            self.variables, opt_state = step(self.variables, opt_state, images, labels)

    def serve(self, policy: str, images: Any) -> Server:
        model = jmpp.wrap(LinenNet(), policy)  # (1) was: LinenNet()
        # (2) Each weight in the dtype that the policy has it made in; norms keep theirs in float32.
        made = jax.eval_shape(partial(model.init, train=False), jax.random.key(0), images)
        weights = jax.tree.map(lambda weight, like: weight.astype(like.dtype), self.variables, made)
        predict = jax.jit(partial(model.apply, train=False))
        return Server(predict.lower(weights, images).compile(), weights)


class NNX:
    def train(self, batches: Any, seed: int) -> None:
        """In float32, with no policy at all."""
        self.model = NNXNet(nnx.Rngs(seed))
        optimizer = nnx.Optimizer(self.model, optax.adam(LEARNING_RATE), wrt=nnx.Param)

        @nnx.jit
        def step(model: NNXNet, optimizer: nnx.Optimizer, images: Any, labels: Any) -> None:
            grads = nnx.grad(lambda model: cross_entropy(model(images), labels))(model)
            optimizer.update(model, grads)

        for images, labels in batches:
            step(self.model, optimizer, images, labels)
        self.model.eval()

    def serve(self, policy: str, images: Any) -> Server:
        model = jmpp.nnx.cast_params(nnx.clone(self.model), policy)  # (1) in place, so of a copy
        model = jmpp.wrap(model, policy)  # (2)
        graph, weights = nnx.split(model)
        predict = jax.jit(lambda weights, images: nnx.merge(graph, weights)(images))
        return Server(predict.lower(weights, images).compile(), weights)


def relative_times(servers: list[Server], images: Any) -> list[float]:
    """Of one call of each, in turns, since other work on the machine slows all of them."""
    seconds = np.empty((CALLS, len(servers)))
    for turn in seconds:
        for i, server in enumerate(servers):
            start = time.perf_counter()
            jax.block_until_ready(server.predict(server.weights, images))
            turn[i] = time.perf_counter() - start
    return [float(ratio) for ratio in np.median(seconds / seconds[:, :1], axis=0)]


def run(library: str, steps: int, seed: int, progress: Progress) -> list[Row]:
    """Trains once, and predicts what the test images are under all POLICIES."""
    rng = np.random.default_rng(seed)
    data = load(rng)
    chosen = (rng.choice(len(data.images), BATCH_SIZE, replace=False) for _ in range(steps))
    batches = ((data.images[batch], data.labels[batch]) for batch in chosen)
    trained = {"Linen": Linen, "NNX": NNX}[library]()
    trained.train(progress.track(batches, total=steps, description=f"{library:5}"), seed)

    images = jnp.asarray(data.test_images)
    servers = [trained.serve(policy, images) for policy in POLICIES.values()]
    times = relative_times(servers, images)
    rows = []
    for name, (predict, weights), ratio in zip(POLICIES, servers, times, strict=True):
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        logits = np.asarray(predict(weights, images))
        rows.append(Row(library, name, logits, size, predict.memory_analysis().temp_size_in_bytes, ratio))
    return rows


def allowed_error(row: Row, full: Row) -> float:
    """How much rounding may change a logit."""
    return LOGIT_ERROR * float(jnp.finfo(row.name).eps) * float(np.abs(full.logits).max())


def same_class(row: Row, full: Row) -> np.ndarray:
    return row.logits.argmax(axis=-1) == full.logits.argmax(axis=-1)


def clear(row: Row, full: Row) -> np.ndarray:
    """Where the two best logits of float32 are too far from each other to change places by rounding.

    That is twice the error that is allowed, not twice the one that is seen, which would excuse any error.
    """
    second, best = np.sort(full.logits, axis=-1)[:, -2:].T
    return best - second >= 2 * allowed_error(row, full)


def judge(rows: list[Row]) -> str | None:
    """Why the comparison failed, or None: half precision must say what float32 says, up to rounding."""
    full = {row.library: row for row in rows if row.name == "float32"}
    for row in rows:
        of, name = full[row.library], f"{row.library} in {row.name}"
        error, allowed = np.abs(row.logits - of.logits).max(), allowed_error(row, of)
        wrong = ~same_class(row, of) & clear(row, of)
        if wrong.any():
            return f"{name} changes the class of {wrong.sum()} images that are clear to float32"
        if not error <= allowed:  # NaN is too large, too
            return f"the largest logit error of {name} is {error:.2e}, more than {allowed:.2e}"
    return None


def outputs(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Logits and probabilities."""
    return row.logits, np.asarray(jax.nn.softmax(jnp.asarray(row.logits)))


def table(rows: list[Row]) -> Table:
    heads = "same\nclass", "at\nleast", "logit\nerror", "probab.\nerror"
    heads += "params\nKiB", "temp.\nMiB", "time"
    result = Table("served", *heads, box=box.SIMPLE_HEAD, pad_edge=False)
    full = {row.library: row for row in rows if row.name == "float32"}
    for row in rows:
        of = full[row.library]
        same, least = same_class(row, of).mean(), clear(row, of).mean()
        errors = (f"{np.abs(a - b).max():.1e}" for a, b in zip(outputs(row), outputs(of), strict=True))
        memory = f"{row.param_bytes / 2**10:.1f}", f"{row.temp_bytes / 2**20:.2f}"
        name = f"{row.library}, {row.name}"
        result.add_row(name, f"{same:.1%}", f"{least:.1%}", *errors, *memory, f"{row.time:.2f}")
    for column in result.columns[1:]:
        column.justify = "right"
    return result


ABOUT = """
A CNN with BatchNorm learns to read 8 x 8 digits in float32, and is served in
three precisions. Half-precision weights are stored once; no float32 is kept.
"""
CAPTION = """\
same class: share of the test images. At least: those whose two best logits are
            further apart in float32 than rounding can move them
errors:     the largest difference from float32
params:     as stored; those of norms, and their statistics, stay float32
temp.:      memory of the compiled program beside them, as XLA reports it for
            this backend ({})
time:       of a batch of {}, over float32's. CPUs compute most half-precision
            products in float32: neither says much about a GPU."""


def compare(steps: int, seed: int, quiet: bool = False) -> list[Row]:
    """Trains in both libraries, serves under all POLICIES, and prints the table."""
    console = Console(highlight=False)
    if not quiet:
        console.print(ABOUT)
    with progress_bar(console, quiet) as progress:
        rows = [row for library in ("Linen", "NNX") for row in run(library, steps, seed, progress)]
    console.print(table(rows))
    if not quiet:
        console.print(CAPTION.format(jax.default_backend(), len(rows[0].logits)))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = Arguments("Serve a CNN in three precisions, with Linen and with NNX, and compare.", steps=200)
    return finish(judge(compare(**vars(parser.parse_args(argv)))))


if __name__ == "__main__":
    sys.exit(main())
