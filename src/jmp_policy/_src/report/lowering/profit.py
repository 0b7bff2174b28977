"""Estimates which modules gain from half precision or float8 at their shapes, and which lose, on one device.

A module is the kernels whose operations have its name. The compiler fuses across modules and names a fusion
after one of its operations, so that neighbours share what lies between them.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from jmp_policy._src.core.targets import Target
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


@dataclasses.dataclass(frozen=True)
class RecipeProfit:
    """Estimated times of a module with float8 products, forward and backward, with its recipe and without.

    Args:
      path: path of the module: "Net/Dense_0".
      recipe: the recipe of its products.
      half_seconds: time with the products in 16 bits.
      seconds: time as it is; both times by the roofline model, a lower bound.
      saved_seconds: time that its products save.
      added_seconds: time that its other kernels take more: they find scales, round, and scale the results.
    """

    path: str
    recipe: str
    half_seconds: float
    seconds: float
    saved_seconds: float
    added_seconds: float

    @property
    def speedup(self) -> float:
        """Returns the time in 16 bits over that in float8; below 1 the module loses by its recipe."""
        return self.half_seconds / self.seconds


def recipe_profits(
    half: Sequence[Kernel], float8: Sequence[Kernel], recipes: Mapping[str, str], target: Target
) -> tuple[RecipeProfit, ...]:
    """Estimates what each module gains by its float8 recipe, those with most time in 16 bits first.

    Args:
      half: kernels of the program without its recipes.
      float8: kernels of the program.
      recipes: recipe of the float8 products of a module, by its path.
      target: the device; without known rates there is no estimate.
    """
    if not target.rates:
        return ()
    before, after = _by_path(half, target), _by_path(float8, target)
    products = [_by_path([k for k in kernels if k.flops], target) for kernels in (half, float8)]
    found = []
    for path, _ in before.most_common():
        # The compiler may join the products of several modules, in both programs or in one.
        if path in recipes and all(seconds[path] for seconds in products):
            saved = products[0][path] - products[1][path]
            added = saved - (before[path] - after[path])
            found.append(RecipeProfit(path, recipes[path], before[path], after[path], saved, added))
    return tuple(found)


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
