"""Whether float8 layers gain, by the estimate of `worthwhile` and by what XLA's compiler makes of them.

Two layers with normalisation and GELU, forward and backward, compiled with and without a recipe for a card
that is not there. Times are those of the roofline, launches included.
"""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_policy as jmpp
from benchmarks import _record
from benchmarks.gpu_target import PluginMissingError, gpu_devices
from jmp_policy._src.core.targets import TARGETS
from jmp_policy._src.jaxpr.matrix_products import Size
from jmp_policy._src.policy.recipes import RECIPES
from jmp_policy._src.products.fp8.profit import Profit, profit_of
from jmp_policy._src.report.lowering.kernels import Kernel, kernels_of
from jmp_policy._src.report.lowering.roofline import kernel_seconds

CARD = "H100"
#: Tokens, features of the input, features between the layers.
SIZES = (
    (4096, 1024, 1024), (4096, 1024, 4096), (16384, 1024, 4096), (4096, 2048, 2048), (8192, 2048, 8192),
    (2048, 2048, 8192), (4096, 4096, 4096), (4096, 4096, 16384), (1024, 8192, 8192), (8192, 3072, 12288),
)  # fmt: skip


class Layers(nn.Module):
    """Two layers around a GELU, with a normalisation in front and a residual connection.

    Args:
      between: features between the layers.
    """

    between: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.Dense(self.between)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(hidden))


def kernels(policy: str, tokens: int, features: int, between: int) -> tuple[Kernel, ...]:
    """The kernels of the layers' forward and backward pass."""
    model = jmpp.wrap(Layers(between), policy)
    x = jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    placed = NamedSharding(Mesh(gpu_devices(), "d"), PartitionSpec())
    types = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=placed), (params, x))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model.apply(params, x).astype(jnp.float32)))  # type: ignore[union-attr]

    lowered: Any = jax.jit(jax.grad(loss, (0, 1))).trace(*types).lower(lowering_platforms=("cuda",))
    program = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    return kernels_of(program.as_text(), TARGETS[CARD])


def seconds(found: tuple[Kernel, ...], products_only: bool = False) -> float:
    """The roofline of kernels: of all with their launches, or of the products without."""
    card = TARGETS[CARD]
    return sum(
        kernel.times * (kernel_seconds(kernel, card)[0] + (0 if products_only else card.launch_seconds))
        for kernel in found
        if kernel.flops or not products_only
    )


def row(recipe: str, size: tuple[int, int, int], half: tuple[Kernel, ...]) -> dict[str, Any]:
    """The compiled program of one size under one recipe, in microseconds for both layers."""
    tokens, features, between = size
    eight = kernels(f"mixed_bfloat16, r={recipe}", *size)
    saved = seconds(half, True) - seconds(eight, True)
    gain = seconds(half) - seconds(eight)
    return {
        "recipe": recipe,
        "tokens": tokens,
        "features": features,
        "between": between,
        "bfloat16_us": round(seconds(half) * 1e6),
        "float8_us": round(seconds(eight) * 1e6),
        "of_bfloat16": round(seconds(eight) / seconds(half), 3),
        "saved_us": round(saved * 1e6),
        "added_us": round((saved - gain) * 1e6),
    }


def estimated(row: dict[str, Any]) -> list[Profit]:
    """What `worthwhile` decides by, for each of the two layers of a row."""
    tokens, features, between = row["tokens"], row["features"], row["between"]
    return [
        profit_of(Size(1, tokens, n, k, 2 * tokens * n * k), row["recipe"], TARGETS[CARD])
        for n, k in ((between, features), (features, between))
    ]


def main() -> None:
    found: list[dict[str, Any]] = []
    try:
        half = {size: kernels("mixed_bfloat16", *size) for size in SIZES}
        for recipe, size in itertools.product(RECIPES, SIZES):
            found.append(row(recipe, size, half[size]))
            print(found[-1], flush=True)
    except PluginMissingError as error:
        print(f"Skipped fp8_profit. {error}")
        return
    _record.save("fp8_profit", found, target=f"NVIDIA {CARD}, compiled only")


if __name__ == "__main__":
    main()
