"""Are the shares of `drift` right? The module with the largest share is put into float32.

    python -m benchmarks.drift_shares

Shares are parts of the square of the gradient's error. If a module introduces a share s of it, the error
without the module is sqrt(1 - s) of what it was. Both errors are measured, operation by operation, so that
each rounds as its dtype says.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import jmp_policy as jmpp
from benchmarks import _record
from benchmarks.sensitivity import gradients, loss_and_params

MODELS = ("MLP-Mixer", "Deep and cross network", "GRU, LSTM and attention", "Scanned gated Transformer")

#: Of the loss: no cotangent of these models is near overflow with it, nor near zero.
SCALE = 2.0**13


def row(name: str) -> dict[str, Any]:
    """Predicted and measured effect of the worst module of one model."""
    loss_fn, params, (batch, *_) = loss_and_params(name)

    def half(params, batch):
        with jmpp.linen.intercept("mixed_float16"):
            return loss_fn(params, batch)

    shares: dict[str, float] = {}
    for found in jmpp.drift(half, params, batch, scale=SCALE).rows:
        _, _, top = found.module.partition("/")
        top = top.partition("/")[0].partition(".")[0]
        shares[top] = shares.get(top, 0.0) + found.share
    shares.pop("", None)  # The model's own operations, which no rule puts into float32 alone.
    worst = max(shares, key=shares.__getitem__)

    def error(rules):
        (grads,) = gradients(loss_fn, params, [batch], rules, SCALE)
        return float(np.linalg.norm(grads - exact) / np.linalg.norm(exact))

    (exact,) = gradients(loss_fn, params, [batch], "float32", 1.0)
    before = error("mixed_float16")
    after = error(jmpp.PolicyMap("mixed_float16", {f"{worst}/**": "float32"}))
    return {
        "model": name,
        "module": worst,
        "share": round(shares[worst], 3),
        "error": float(f"{before:.3g}"),
        "without": float(f"{after:.3g}"),
        "without / error": round(after / before, 3),
        "predicted": round(float(np.sqrt(max(1 - shares[worst], 0))), 3),
    }


def main(names: Sequence[str] = ()) -> None:
    """Measures models, and saves after each."""
    for name in names or MODELS:
        new = row(name)
        rows = [*_record.kept("drift_shares", "model", new=[new]), new]
        _record.save("drift_shares", sorted(rows, key=lambda r: MODELS.index(r["model"])))


if __name__ == "__main__":
    main(sys.argv[1:])
