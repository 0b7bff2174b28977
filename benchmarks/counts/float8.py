"""What float8 recipes make of training steps and layers, compiled only.

Rooflines are those of `lowering_report`: a lower bound by kernel, launches included. `fp8_gpu`: steps on an
H100. `fp8_blocks`: one product and its two gradients on H100 and B200. `fp8_profit`: whether layers gain, by
the estimate of `worthwhile` and by what XLA's compiler makes of two of them with normalisation and GELU.
`fp8_attention`: attention with its own products in float8, on an H100, and the error of a gradient.
"""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.counts.encoder import WIDTHS
from benchmarks.gpu_target import H100, TARGET, compiled_for_gpu, count
from benchmarks.models import MODELS
from benchmarks.models.small import Encoder, language
from benchmarks.table import Table
from jmp_policy._src.jaxpr.matrix_products import Size
from jmp_policy._src.policy.recipes import RECIPES
from jmp_policy._src.products.fp8.eligibility import Profit, profit_of
from jmp_policy._src.products.fp8.functions import Float8DotGeneral
from jmp_policy._src.report.lowering.hlo import CONTAINERS, NO_KERNEL, arrays, parse
from jmp_policy._src.report.lowering.kernels import Kernel, estimates, kernel_seconds, kernels_of

WIDE = {"vocabulary": 30528, "hidden": 4096, "heads": 32, "mlp": 16384}
SIZES = {
    "BERT width, 4 layers": language(Encoder(**WIDTHS), 32, 128),
    "GPT-2": MODELS["GPT-2"]("full"),
    "4096 wide, 1 layer": language(Encoder(**WIDE, layers=1), 8, 512),
    "4096 wide, 4 layers, 4 times as many tokens": language(Encoder(**WIDE, layers=4), 32, 512),
}
STEP_RECIPES = ("bfloat16", "fp8_current", "fp8_rowwise")


def policy_of(recipe: str) -> str:
    return "mixed_bfloat16" if recipe == "bfloat16" else f"mixed_bfloat16, r={recipe}"


def for_scales(text: str) -> int:
    """Counts the kernels of a program that compute a scale, or largest values for it, and nothing else."""
    computations, entry = parse(text)
    kernels = (i for i in computations[entry] if i.opcode not in NO_KERNEL | CONTAINERS)
    return sum("float8_scale" in i.op_name and len(arrays(i.shape)) == 1 for i in kernels)


def step_rows(size: str) -> list[dict[str, Any]]:
    found, base, model = [], None, SIZES[size]
    for recipe in STEP_RECIPES:
        variant = steps.plain(jmpp.wrap(model.module, policy_of(recipe)))
        program = compiled_for_gpu(*steps.types(variant, model))
        text = program.as_text()
        report = count(text, program.memory_analysis().temp_size_in_bytes)
        (estimate,) = estimates({"bfloat16": ("as given", kernels_of(text, H100))}, H100)
        base = base or (report, estimate.seconds)
        found.append({
            "policy": recipe,
            "float8_products": sum(n for dots, n in report.dots.items() if "f8" in dots),
            "other_products": sum(n for dots, n in report.dots.items() if "f8" not in dots),
            "kernels": report.kernels,
            "for_scales": for_scales(text),
            "gigabytes": round(report.bytes / 1e9, 2),
            "added_bytes": f"{report.bytes / base[0].bytes - 1:+.1%}",
            "temp_gigabytes": round(report.temp_bytes / 1e9, 3),
            "roofline_ms": round(estimate.seconds * 1e3, 3),
            "of_bfloat16": round(estimate.seconds / base[1], 3),
        })  # fmt: skip
    return found


BLOCK_SIZE = 8192
BLOCK_RECIPES = ("bfloat16", "fp8_current", "fp8_block", "mxfp8", "nvfp4")


def layer(recipe: str) -> Any:
    """The product of a GELU and a weight, and its gradients."""
    product = lax.dot_general if recipe == "bfloat16" else Float8DotGeneral(recipe)

    def run(x: Any, w: Any, ct: Any) -> Any:
        with jmpp.rounding_key(jax.random.key(0)):
            out, vjp = jax.vjp(lambda x, w: product(jax.nn.gelu(x), w, (((1,), (0,)), ((), ()))), x, w)
        return out, *vjp(ct)

    return run


def block_rows(card: str) -> list[dict[str, Any]]:
    found, base = [], None
    types = [jax.ShapeDtypeStruct((BLOCK_SIZE, BLOCK_SIZE), jnp.bfloat16)] * 3
    for recipe in BLOCK_RECIPES:
        report = jmpp.lowering_report(layer(recipe), *types, target=card)
        seconds = next(e.seconds for e in report.estimates if e.program == "as given")
        base = base or seconds
        kernels = [k for k in report.kernels if k.counted]
        found.append({
            "recipe": recipe,
            "arithmetic": ", ".join(sorted({k.arithmetic for k in report.matrix_kernels})),
            "kernels": len(kernels),
            "gigabytes": round(sum(k.bytes_read + k.bytes_written for k in kernels) / 1e9, 2),
            "roofline_ms": round(seconds * 1e3, 3),
            "of_bfloat16": round(seconds / base, 2),
        })  # fmt: skip
    return found


#: Tokens, features of the input, features between the layers.
LAYER_SIZES = (
    (4096, 1024, 1024), (4096, 1024, 4096), (16384, 1024, 4096), (4096, 2048, 2048), (8192, 2048, 8192),
    (2048, 2048, 8192), (4096, 4096, 4096), (4096, 4096, 16384), (1024, 8192, 8192), (8192, 3072, 12288),
)  # fmt: skip


class Layers(nn.Module):
    """Two layers around a GELU, with a normalisation in front and a residual connection."""

    between: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.Dense(self.between)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(hidden))


def kernels(recipe: str, tokens: int, features: int, between: int) -> tuple[Kernel, ...]:
    """The kernels of the layers' forward and backward pass."""
    model = jmpp.wrap(Layers(between), policy_of(recipe))
    x = jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        with jmpp.rounding_key(jax.random.key(0)):
            out = model.apply(params, x)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))  # type: ignore[union-attr]

    program = compiled_for_gpu(jax.jit(jax.grad(loss, (0, 1))), (params, x))
    return kernels_of(program.as_text(), H100)


def seconds(found: tuple[Kernel, ...], products_only: bool = False) -> float:
    """The roofline of kernels: of all with their launches, or of the products without."""
    return sum(
        kernel.times * (kernel_seconds(kernel, H100)[0] + (0 if products_only else H100.launch_seconds))
        for kernel in found
        if kernel.flops or not products_only
    )


def layer_rows() -> list[dict[str, Any]]:
    halves, found = {size: kernels("bfloat16", *size) for size in LAYER_SIZES}, []
    for recipe, size in itertools.product(RECIPES, LAYER_SIZES):
        half, eight = halves[size], kernels(recipe, *size)
        saved = seconds(half, True) - seconds(eight, True)
        gain = seconds(half) - seconds(eight)
        found.append({
            "recipe": recipe,
            **dict(zip(("tokens", "features", "between"), size, strict=True)),
            "bfloat16_us": round(seconds(half) * 1e6),
            "float8_us": round(seconds(eight) * 1e6),
            "of_bfloat16": round(seconds(eight) / seconds(half), 3),
            "saved_us": round(saved * 1e6),
            "added_us": round((saved - gain) * 1e6),
        })  # fmt: skip
    return found


def estimated(row: dict[str, Any]) -> list[Profit]:
    """What `worthwhile` decides by, for each of the two layers of a row."""
    tokens, features, between = row["tokens"], row["features"], row["between"]
    return [
        profit_of(Size(1, tokens, n, k, 2 * tokens * n * k), row["recipe"], H100)
        for n, k in ((between, features), (features, between))
    ]


ATTENTION_RECIPES = (
    "",
    "fp8_current",
    *(f"fp8_current+{of}" for of in ("scores", "values", "scores+values")),
)


def attention_rows(length: str) -> list[dict[str, Any]]:
    """An attention layer of 16 heads of 128, and the error of a smaller one's gradient."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        heads = 16 if x.shape[-1] == 2048 else 2
        x = x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
        q, k, v = ((x @ w).reshape(*x.shape[:2], heads, -1) for w in params[:3])
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        return jnp.mean(jnp.square(x + out @ params[3] @ params[4]))

    def arguments(width: int, length: int) -> Any:
        keys = jax.random.split(jax.random.key(0), 6)
        draw = jax.random.normal
        return [draw(key, (width, width)) * width**-0.5 for key in keys[:5]], draw(
            keys[5], (4, length, width)
        )

    params, x = arguments(128, 256)
    exact = ravel_pytree(jax.grad(loss)(params, x))[0]
    found, base = [], None
    for recipe in ATTENTION_RECIPES:
        half = jmpp.autocast(loss, policy_of(recipe or "bfloat16"))
        error = jnp.linalg.norm(ravel_pytree(jax.grad(half)(params, x))[0] - exact) / jnp.linalg.norm(exact)
        types = jax.eval_shape(functools.partial(arguments, 2048, int(length)))
        report = jmpp.lowering_report(jax.grad(half, (0, 1)), *types, target="H100")
        spent = next(e.seconds for e in report.estimates if e.program == "as given")
        base = base or spent
        found.append({
            "recipe": recipe or "bfloat16",
            "gradient_error": round(float(error), 4),
            "roofline_ms": round(spent * 1e3, 3),
            "of_bfloat16": round(spent / base, 3),
        })  # fmt: skip
    return found


BLOCKS = {"target": "H100 and B200, compiled only", "size": BLOCK_SIZE}
TABLES = (
    Table("fp8_gpu", step_rows, by={"size": SIZES}, about={"target": TARGET}),
    Table("fp8_blocks", block_rows, by={"target": ("H100", "B200")}, about=BLOCKS),
    Table("fp8_attention", attention_rows, by={"length": ("2048", "8192")}, about={"target": TARGET}),
    Table("fp8_profit", layer_rows, about={"target": "NVIDIA H100, compiled only"}),
)
