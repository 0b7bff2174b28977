"""What a training step sends and keeps on hundreds of devices, by the compilers for them alone.

`scaling_out`: a Llama of 7 billion parameters, shapes only, its equal layers in a loop: AdamW, weights and
optimizer state split over both axes of the mesh (FSDP x tensor parallel), `nn.remat`, gradients of
micro-batches of one sequence per row of the mesh added up. A quarter of an hour on two cores per slice.
`experts_sent`: a Llama with eight experts, each on one of eight cards, and the batch over the same cards.

Bytes are those that a device hands to collectives per step, loops counted as often as they run.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.gpu_target import TARGET, compiled_for
from benchmarks.models import llama
from benchmarks.models._model import cross_entropy
from benchmarks.table import Table
from jmp_policy._src.core.targets import find_target
from jmp_policy._src.report.lowering.kernels import Kernel, estimates

LENGTH = 4096
SEVEN = llama.Llama(
    length=LENGTH, hidden=4096, heads=32, groups=32, width=11008, layers=32, scanned=True, remat=True
)
#: Slice or card -> devices along the batch and along the width of layers, and sequences per row of these.
SLICES = {"v5e": ((16, 16), 16), "v5p": ((16, 4), 4), "H100": ((8, 8), 8)}

#: How the weights of a scanned layer are split, by the name of layer or parameter.
_UP, _DOWN = P(None, "data", "model"), P(None, "model", "data")
SPLIT = {
    **dict.fromkeys(("q", "k", "v"), P(None, "data", "model", None)),
    **{"out": P(None, "model", None, "data"), "embedding": P("model", "data"), "head": P("data", "model")},
    **{"DenseGeneral_0": _UP, "DenseGeneral_1": _UP, "DenseGeneral_2": _DOWN},
}
#: How experts are placed.
PLACED = dict.fromkeys(("up", "gate", "down"), P("data"))

Gradient = Callable[..., Any]


def accumulated_by_hand(loss_fn: Any, count: int) -> Gradient:
    """The gradient of a mean over micro-batches, in float32."""

    def gradient(_: Any, params: Any, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            made = jax.value_and_grad(loss_fn)(params, part)
            return jax.tree.map(lambda t, x: t + x / count, total, made), None

        parts = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (jnp.float32(0), params))
        return jax.lax.scan(add, zeros, parts)[0]

    return gradient


def at_once(loss_fn: Any, _: int) -> Gradient:
    return jmpp.scaled_value_and_grad(loss_fn)


def in_float8(loss_fn: Any, _: int) -> Gradient:
    return jmpp.scaled_value_and_grad(jmpp.autocast(loss_fn, lower="fp8_current"))


def scaled_adamw() -> Any:
    return jmpp.loss_scaled(steps.ADAMW, jmpp.DynamicLossScale())


POLICIES = ("mixed_bfloat16", "mixed_float16", "mixed_bfloat16, g=f32", "mixed_bfloat16, r=fp8_current")


def variants(module: Any) -> dict[str, tuple[Any, Any, Any]]:
    """The model, the optimizer, and how gradients are found."""
    found = {
        policy: (jmpp.wrap(module, policy), scaled_adamw(), jmpp.accumulate_gradients) for policy in POLICIES
    }
    return {
        "by hand, bfloat16": (steps.ByHand(module, jnp.bfloat16), steps.ADAMW, accumulated_by_hand),
        **found,
    }


def compiled_step(
    variant: tuple[Any, Any, Any],
    mesh: jax.sharding.Mesh,
    split: dict[str, P],
    shape: tuple[int, int],
    count: int,
    card: str,
) -> tuple[tuple[Kernel, ...], Any]:
    """Compiles a step of a variant; its kernels, and what the compiler says of it."""
    model, tx, ways = variant

    def place(path: Any, x: Any) -> Any:
        names = [getattr(key, "key", None) for key in path]
        specs = [split[name] for name in names if name in split and len(split[name]) <= x.ndim]
        return x.update(sharding=NamedSharding(mesh, specs[0] if specs else P()))

    def loss_fn(params: Any, batch: Any) -> Any:
        return cross_entropy(model.apply({"params": params}, batch[0]), batch[1])

    gradient = ways(loss_fn, count)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = gradient(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
        state = jax.tree_util.tree_map_with_path(place, (params, jax.eval_shape(tx.init, params)))
        places = jax.tree.map(lambda x: x.sharding, state)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
        kernels, answer = compiled_for(find_target(card), jitted, state, (tokens, tokens))
    if answer.error:
        raise RuntimeError(answer.error)
    return kernels, answer


#: Collectives that move numbers as they are; others add them up. Of so few bytes it is a number or flags.
MOVES, FEW = ("all-gather", "collective-permute", "all-to-all"), 1024

#: Dtypes of what collectives take; several arrays in one count as the first of these that is among them.
KINDS = {
    "float32": {"float32"},
    "half": {"bfloat16", "float16"},
    "8 bits": {"float8_e4m3fn", "float8_e5m2", "uint8"},
}


def sent(kernels: tuple[Kernel, ...]) -> dict[str, Any]:
    """Gigabytes that are moved and added up by dtype, and how many collectives are of single numbers."""
    found: Counter[str] = Counter()
    for kernel in kernels:
        if kernel.collective and kernel.bytes_read > FEW:
            what, given = "moved" if kernel.collective in MOVES else "added", set(kernel.operands.split(", "))
            kind = next((name for name, dtypes in KINDS.items() if dtypes & given), "others")
            found[f"{what} {kind}"] += kernel.bytes_read * kernel.times
    few = sum(bool(kernel.collective) and kernel.bytes_read <= FEW for kernel in kernels)
    return {"of_numbers": few, **{name: round(size / 1e9, 3) for name, size in sorted(found.items())}}


def mesh_of(*shape: int, names: tuple[str, ...]) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices)


def scaling_out_rows(slice_: str) -> list[dict[str, Any]]:
    (data, model), count = SLICES[slice_]
    mesh, found = mesh_of(data, model, names=("data", "model")), []
    for name, variant in variants(SEVEN).items():
        card = find_target(slice_)
        # TPUs multiply no float16; those of attention do not compile.
        if ("fp8" in name and "float8" not in card.rates) or (
            name == "mixed_float16" and card.platform == "tpu"
        ):
            continue
        shape = (data * count, LENGTH)
        kernels, answer = compiled_step(variant, mesh, SPLIT, shape, count, slice_)
        memory = (answer.argument_bytes + answer.temp_bytes) / 1e9
        row = {"devices": data * model, "variant": name, "gigabytes": round(memory, 2)}
        found.append(row | {"kernels": sum(k.times for k in kernels)} | sent(kernels))
    return found


def experts_rows(devices: str) -> list[dict[str, Any]]:
    module = llama.Llama(length=1024, hidden=1024, heads=8, width=2816, layers=2, experts=8, axis="data")
    models = {name: model for name, (model, *_) in variants(module).items() if "fp8" not in name}
    made = {name: (model, scaled_adamw(), at_once) for name, model in models.items()}
    made["autocast, r=fp8_current"] = (module, scaled_adamw(), in_float8)
    rows, mesh = [], mesh_of(int(devices), names=("data",))
    for name, variant in made.items():
        kernels, answer = compiled_step(variant, mesh, PLACED, (2 * int(devices), 1024), 1, "H100")
        (estimate,) = estimates({"bfloat16": ("as given", kernels)}, find_target("H100"))
        memory = {"temp_gigabytes": round(answer.temp_bytes / 1e9, 3)}
        rows.append(
            {"variant": name, "roofline_ms": round(estimate.seconds * 1e3, 2), **memory, **sent(kernels)}
        )
    return rows


ABOUT = {"parameters": 6.7e9, "length": LENGTH}
TABLES = (
    Table("scaling_out", scaling_out_rows, by={"target": SLICES}, about=ABOUT, cpus=256),
    Table("experts_sent", experts_rows, by={"devices": ("1", "8")}, about={"target": TARGET}, cpus=8),
)
