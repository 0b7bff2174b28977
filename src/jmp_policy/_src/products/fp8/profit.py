"""Estimates whether a float8 recipe gains: time that products save against time to round their operands.

The model is that of the roofline: a product takes the time of its arithmetic or of its memory traffic,
whichever is longer, and rounding takes the time of its traffic and launches.
"""

from typing import NamedTuple

from jmp_policy._src.core.targets import Target
from jmp_policy._src.jaxpr.matrix_products import Size
from jmp_policy._src.policy.recipes import passes_of
from jmp_policy._src.policy.worthwhile import target_of
from jmp_policy._src.products.fp8.blocks import BLOCKS


class _Rounding(NamedTuple):
    """What a recipe adds to a layer's training step, as XLA compiles it.

    Args:
      activations: bytes of traffic for each element of the input and of the output's cotangent. Two bytes are
        read for the largest value and again for the cast, where no other kernel has them at hand.
      weights: bytes for each element of the weight and of its gradient.
      kernels: how many there are more.
    """

    activations: int
    weights: int
    kernels: int


#: As compiled for H100 at 1024 to 12288 features: a little more than all that was counted there
#: (`benchmarks/counts/float8.py`), so that what is chosen gains.
_PER_TENSOR = _Rounding(3, 4, 6)
#: The products of a tensor sum over different axes, along which it has other scales: it is rounded twice.
_PER_BLOCK = _Rounding(8, 15, 12)
_ROUNDING = {"fp8_current": _PER_TENSOR, "fp8_delayed": _PER_TENSOR}


class Profit(NamedTuple):
    """Estimated effect of a recipe on a product and the two of its gradient.

    Args:
      half: seconds of the three products in 16 bits.
      saved: seconds that they save in 8 bits.
      added: seconds that it takes to round the two operands and the cotangent.
    """

    half: float
    saved: float
    added: float

    @property
    def gains(self) -> bool:
        """Returns whether more is saved than added."""
        return self.saved > self.added

    def __str__(self) -> str:
        return f"{self.saved * 1e6:.3g} us saved, {self.added * 1e6:.3g} us added"


def profit_of(size: Size, recipe: str, target: Target) -> Profit:
    """Estimates what a recipe saves and adds in a training step.

    Args:
      size: of the product in the forward pass.
      recipe: of the two passes.
      target: the device.
    """
    batch, m, n, k, _ = size
    forward, gradients = [(m, n, k)], [(m, k, n), (k, n, m)]
    fwd, bwd = passes_of(recipe)
    parts = [(fwd, forward, m * k), (bwd, gradients, m * (k + n))]
    if fwd == bwd:  # What is rounded forward is so for the gradients.
        parts = [(fwd, forward + gradients, m * (k + n))]
    half = saved = added = 0.0
    for name, products, activations in parts:
        before = sum(_seconds(product, 2, target) for product in products)
        half += batch * before
        if name is not None:
            width = 2 if name in BLOCKS and "mxfp8" not in target.on_tensor_cores else 1
            saved += batch * (before - sum(_seconds(product, width, target) for product in products))
            rounding = _ROUNDING.get(name, _PER_BLOCK)
            traffic = batch * (rounding.activations * activations + rounding.weights * k * n)
            added += traffic / target.bandwidth + rounding.kernels * target.launch_seconds
    return Profit(half, saved, added)


def _seconds(size: tuple[int, int, int], width: int, target: Target) -> float:
    m, n, k = size
    rate = target.rate("bfloat16" if width == 2 else "float8")
    return max(2 * m * n * k / rate, (width * (m * k + k * n) + 2 * m * n) / target.bandwidth)


def loses(size: Size, recipe: str) -> str:
    """Returns why a product stays in compute dtype under a recipe that is to gain on a device, or "".

    Args:
      size: of the product in the forward pass.
      recipe: "fp8_current@H100"; one without a device is followed everywhere.
    """
    target = target_of(recipe)
    if target is None:
        return ""
    if not all(isinstance(n, int) for n in size) or 0 in size:
        return f"its size, which is not known when it is traced, decides whether it gains on {target.name}"
    profit = profit_of(size, recipe, target)
    return "" if profit.gains else f"no gain on {target.name}: {profit}"
