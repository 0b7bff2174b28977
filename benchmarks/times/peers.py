"""Real models' float16 steps with jmp, mpx and Flax's DynamicScale, in an environment that has them.

The first command builds that environment, `.venv-peers`, and all measure inside it. "H100" compiles the
models at their published sizes for one, about a minute per row, but for the steps by hand and with this
library, which `zoo_gpu` counts. "CPU" times small ones. "H100, Keras" compiles Keras's ResNet-50 with and
without loss scaling.
"""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.gpu_target import TARGET, Report, compile_for_gpu, table_rows
from benchmarks.models import MODELS, Model
from benchmarks.table import Table

ENVIRONMENT = pathlib.Path(".venv-peers")
PEERS = ("jmp", "mixed-precision-for-jax", "keras")
SAME = ("jax", "flax", "optax", "rich")
BASE = "by hand"
KERAS = "H100, Keras"
REPEATS = 7
#: Steps that `zoo_gpu` compiles for the same card: they are counted there.
COUNTED_BY_ZOO_GPU = {BASE: "by hand, scaling by hand", "jmp_policy": "wrapped, loss_scaled"}
INITIAL_SCALE = 2.0**15  # float16 holds it: mpx casts its scale to float16.


def jmp_step(model: Any, tx: Any, loss: Any = steps.cross_entropy) -> Any:
    """jmp: the parameter tree and the inputs are cast in front of a model without dtypes.

    Its loss scale is taken apart outside the step, where JAX cannot lower it whole.
    """
    import jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def in_full(outputs: Any, labels: Any) -> jax.Array:
        return loss(policy.cast_to_output(outputs), labels)

    def step(state: steps.State, batch: Any) -> tuple[steps.State, jax.Array]:
        value, counter = state.scale
        scale = jmp.DynamicLossScale(value, counter=counter)

        def loss_fn(params: Any) -> Any:
            params, inputs = policy.cast_to_compute((params, batch[0]))
            value, stats = steps.loss_and_stats(model, params, state.stats, (inputs, batch[1]), in_full)
            return scale.scale(value), (value, stats)

        (_, (loss_value, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = scale.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), stats, opt_state
        kept = jmp.select_tree(finite, new, tuple(state[:3]))
        scale = scale.adjust(finite)
        return steps.State(*kept, (scale.loss_scale, scale.counter)), loss_value

    return step


def jmp_scale() -> Any:
    return jnp.float32(INITIAL_SCALE), jnp.int32(0)


def mpx_step(model: Any, tx: Any, loss: Any = steps.cross_entropy) -> Any:
    """mpx: its `filter_value_and_grad` casts parameters and batch, but not what the loss closes over."""
    import mpx

    def step(state: steps.State, batch: Any) -> tuple[steps.State, jax.Array]:
        def loss_fn(params: Any, batch: Any) -> Any:
            return steps.loss_and_stats(model, params, state.stats, batch, loss)

        gradient = mpx.filter_value_and_grad(loss_fn, state.scale, has_aux=True)
        (value, stats), scale, finite, grads = gradient(state.params, batch)
        params, opt_state = mpx.optimizer_update(state.params, tx, state.opt_state, grads, finite)
        stats = mpx.select_tree(finite, stats, state.stats)
        return steps.State(params, stats, opt_state, scale), value

    return step


def mpx_scale() -> Any:
    import mpx

    return mpx.DynamicLossScaling(jnp.float32(INITIAL_SCALE), jnp.float32(1))


def flax_step(model: Any, tx: Any, loss: Any = steps.cross_entropy) -> Any:
    """Flax's DynamicScale around a model with `dtype=float16` by hand, as in its ImageNet example."""

    def step(state: steps.State, batch: Any) -> tuple[steps.State, jax.Array]:
        def loss_fn(params: Any) -> Any:
            return steps.loss_and_stats(model, params, state.stats, batch, loss)

        gradient = state.scale.value_and_grad(loss_fn, has_aux=True)
        scale, finite, (value, stats), grads = gradient(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), opt_state
        old = state.params, state.opt_state
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return steps.State(params, stats, opt_state, scale), value

    return step


def flax_scale() -> Any:
    from flax.training.dynamic_scale import DynamicScale

    return DynamicScale(scale=jnp.float32(INITIAL_SCALE))


def keras_step(scaled: bool) -> tuple[Any, Any]:
    """A step of Keras's ResNet-50 under `mixed_float16` by its stateless functions, and its state's types."""
    os.environ["KERAS_BACKEND"] = "jax"  # Read when Keras is imported.
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.applications.ResNet50(weights=None, classifier_activation=None)
    keras.config.set_dtype_policy(before)
    optimizer = keras.optimizers.AdamW(1e-4)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        (params, others, opt_state), ((images,), labels) = state, batch

        def loss_fn(params: Any) -> Any:
            logits, new = model.stateless_call(params, others, images, training=True)
            loss = steps.cross_entropy(logits, labels)
            with keras.StatelessScope(list(zip(optimizer.variables, opt_state, strict=True))):
                scaled_loss = optimizer.scale_loss(loss)
            return scaled_loss, (loss, new)

        (_, (loss, others)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        params, opt_state = optimizer.stateless_apply(opt_state, grads, params)
        return (params, others, opt_state), loss

    kinds = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    return step, tuple([jax.ShapeDtypeStruct(v.shape, v.value.dtype) for v in kind] for kind in kinds)


def variants(model: Model) -> dict[str, steps.Variant]:
    """The step with each library."""
    bare, hand = model.module, steps.ByHand(model.module, jnp.float16)
    with_peers = {
        "jmp": (bare, jmp_step, jmp_scale),
        "mpx": (bare, mpx_step, mpx_scale),
        "flax DynamicScale": (hand, flax_step, flax_scale),
    }
    return {
        BASE: steps.hand_scaled(hand),
        "jmp_policy": steps.scaled(jmpp.wrap(bare, "mixed_float16")),
        **{name: steps.Variant(model, steps.ADAMW, *made) for name, (model, *made) in with_peers.items()},
    }


def gpu_rows(name: str, size: str = "full", compiled: Callable[..., Report] = compile_for_gpu) -> list[Any]:
    """One row per library: what share of its FLOPs is in half precision, and what its step is on an H100."""
    model = MODELS[name](size)
    rows = []
    for library, variant in variants(model).items():
        row = {"where": "H100", "model": name, "library": library}
        try:
            step, arguments = steps.types(variant, model)
            row["half_share"] = round(jmpp.audit(step, *arguments).half_share, 4)
            if library not in COUNTED_BY_ZOO_GPU:
                (found,) = table_rows({library: compiled(step, arguments)}, {})
                row |= {quantity: value for quantity, value in found.items() if quantity != "variant"}
        except jmpp.report.LoweringUnavailableError:
            raise
        except Exception as error:  # A peer that fails on a model is a result.
            row["error"] = measure.described(error)
        rows.append(row)
    return rows


def cpu_rows(name: str, size: str = "small", repeats: int = REPEATS) -> list[Any]:
    """One row per library: times and counts relative to the step by hand, on the CPU of this machine."""
    model = MODELS[name](size)
    batch, made, errors = model.batch(), variants(model), {}
    begun = steps.all_begun(made, batch, model.loss)
    # A peer that fails on this JAX is a result.
    found = measure.in_turn(begun, batch, repeats, steps=2, clock=time.process_time, errors=errors)
    return [
        {"where": "CPU", "model": name, "library": library}
        | (
            {"error": errors[library]}
            if library in errors
            else measure.compared(found, library, BASE, *measure.USUAL)
        )
        for library in made
    ]


def keras_rows(name: str) -> list[Any]:
    """Keras's own ResNet-50 without and with its `LossScaleOptimizer`, both branches of its skip counted.

    It is another model than ours: what its loss scaling adds can be compared, and nothing else.
    """
    if name != "ResNet-50":
        return []
    batch, reports, plain = MODELS[name]("full").shapes(), {}, "keras, no scaling"
    for library, scaled in ((plain, False), ("keras LossScaleOptimizer", True)):
        step, state = keras_step(scaled)
        reports[library] = compile_for_gpu(jax.jit(step, donate_argnums=0), (state, batch))
    found = table_rows(reports, {"keras LossScaleOptimizer": plain})
    return [{"library": row.pop("variant"), **row} for row in found]


PARTS = {"H100": lambda name: gpu_rows(name), "CPU": lambda name: cpu_rows(name), KERAS: keras_rows}


class PeerTable(Table):
    """A table that is measured in the environment of the peers, which its first use builds."""

    def main(self, words: Sequence[str] = ()) -> None:
        if pathlib.Path(sys.prefix).resolve() == ENVIRONMENT.resolve():
            self.inside(words)
            return
        build_environment()
        sources = pathlib.Path(jmpp.__file__).parents[1], pathlib.Path(__file__).parents[2]
        path = os.pathsep.join(map(str, sources))
        command = [ENVIRONMENT / "bin" / "python", "-m", "benchmarks", self.name, *words]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})

    inside = Table.main


def build_environment() -> None:
    """Makes the peers' environment, with the versions of JAX, Flax and optax that run here."""
    pip = [ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet"]
    if not ENVIRONMENT.exists():
        print(f"Building {ENVIRONMENT} ...")
        venv.create(ENVIRONMENT, with_pip=True)
        pinned = [f"{name}=={importlib.metadata.version(name)}" for name in SAME]
        subprocess.run([*pip, *pinned], check=True)
    plugins = [f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt")]
    for peer in (*PEERS, *plugins, "nvidia-cuda-nvcc-cu12", "flatbuffers"):
        subprocess.run([*pip, peer], check=False)  # What does not install shows up as an error in its rows.


def versions() -> dict[str, str]:
    """Of the peers, as they are installed here."""
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {peer: installed.get(peer, "not installed") for peer in PEERS}


ABOUT = {"target": TARGET, "optimizer": "AdamW", "relative_to": BASE, "repeats": REPEATS}
ZOO = PeerTable(
    "zoo_peers",
    lambda where, name: PARTS[where](name),
    by={"where": ("H100", "CPU", KERAS), "model": MODELS},
    about={**ABOUT, "peers": versions()},
)
TABLES = (ZOO,)
