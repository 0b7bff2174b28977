"""Estimates which modules gain from half precision at their shapes, and which lose, on one device.

A module is the kernels whose operations have its name. The compiler fuses across modules and names a fusion
after one of its operations, so that neighbours share what lies between them.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jmp_policy._src.core.targets.target import Target
from jmp_policy._src.report.lowering.kernels import Kernel
from jmp_policy._src.report.lowering.roofline import kernel_seconds


@dataclasses.dataclass(frozen=True)
class LayerProfit:
    """Estimated times of a module, forward and backward, in float32 and in half precision.

    Args:
      path: path of the module: "Net/Dense_0".
      precision: the half type.
      float32_seconds: time in float32 at JAX's default precision, which is TF32 or a single bfloat16 product
        on the devices that have them.
      seconds: time in the half type; both times by the roofline model, a lower bound.
    """

    path: str
    precision: str
    float32_seconds: float
    seconds: float

    @property
    def speedup(self) -> float:
        """Returns the time in float32 over that in half precision; below 1 the module loses."""
        return self.float32_seconds / self.seconds


def layer_profits(
    float32: Sequence[Kernel], half: Sequence[Kernel], precision: str, target: Target
) -> tuple[LayerProfit, ...]:
    """Estimates each module's gain, those with most time in float32 first.

    Args:
      float32: kernels of the program in float32.
      half: kernels of the program in half precision.
      precision: the half type.
      target: the device; without known rates there is no estimate.
    """
    if not target.rates:
        return ()
    before, after = _by_path(float32, target), _by_path(half, target)
    # A module of only one of the programs was fused with its neighbours in the other.
    common = [path for path, _ in before.most_common() if path and after[path]]
    return tuple(LayerProfit(path, precision, before[path], after[path]) for path in common)


def _by_path(kernels: Sequence[Kernel], target: Target) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for kernel in kernels:
        time = kernel_seconds(kernel, target)[0] + target.launch_seconds
        seconds[kernel.path] += kernel.times * time  # type: ignore[assignment]
    return seconds
