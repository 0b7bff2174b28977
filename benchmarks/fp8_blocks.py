"""What float8 recipes make of one product and its two gradients on H100 and B200: compiled only.

The roofline is that of `lowering_report`: a lower bound by kernel, launches included.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jmp_policy as jmpp
from benchmarks import _record
from jmp_policy._src.products.fp8.functions import Float8DotGeneral

SIZE = 8192
RECIPES = ("bfloat16", "fp8_current", "fp8_block", "mxfp8")


def layer(recipe: str) -> Any:
    """Returns the product of a GELU and a weight, and its gradients."""
    product = lax.dot_general if recipe == "bfloat16" else Float8DotGeneral(recipe)

    def run(x: Any, w: Any, ct: Any) -> Any:
        out, vjp = jax.vjp(lambda x, w: product(jax.nn.gelu(x), w, (((1,), (0,)), ((), ()))), x, w)
        return out, *vjp(ct)

    return run


def rows() -> list[dict[str, Any]]:
    """One row per card and recipe, with ratios to bfloat16."""
    found = []
    types = [jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)] * 3
    for card in ("H100", "B200"):
        base = None
        for recipe in RECIPES:
            report = jmpp.lowering_report(layer(recipe), *types, target=card)
            seconds = next(e.seconds for e in report.estimates if e.program == "as given")
            base = base or seconds
            kernels = [k for k in report.kernels if k.counted]
            found.append(
                {
                    "target": card,
                    "recipe": recipe,
                    "arithmetic": ", ".join(sorted({k.arithmetic for k in report.matrix_kernels})),
                    "kernels": len(kernels),
                    "gigabytes": round(sum(k.bytes_read + k.bytes_written for k in kernels) / 1e9, 2),
                    "roofline_ms": round(seconds * 1e3, 3),
                    "of_bfloat16": round(seconds / base, 2),
                }
            )
            print(found[-1], flush=True)
    return found


def main() -> None:
    _record.save("fp8_blocks", rows(), target="H100 and B200, compiled only", size=SIZE)


if __name__ == "__main__":
    main()
