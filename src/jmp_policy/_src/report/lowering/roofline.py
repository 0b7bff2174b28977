"""Estimates the time of a step in which every kernel runs at the peak rate of the card's units or memory.

S. Williams, A. Waterman, D. Patterson, Roofline: An Insightful Visual Performance Model (2009), by kernel,
plus the time to launch each. Real kernels stay below those rates, so that the times are lower bounds.

A module is the kernels whose operations have its name. The compiler fuses across modules and names a fusion
after one of its operations, so that neighbours share what lies between them.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jmp_policy._src.core.targets import Target
from jmp_policy._src.report.lowering.kernels import Kernel

#: Data that a ring collective sends over a link, as a multiple of its operand, by number of devices.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
}

#: Colours that the colour-blind tell apart (M. Okabe, K. Ito, 2008).
_COLOURS = {
    "float32": "#000000", "tf32": "#E69F00", "float16": "#0072B2", "bfloat16": "#009E73", "float8": "#CC79A7",
    "float4": "#F0E442", "int8": "#56B4E9", "float64": "#999999", "bfloat16_x3": "#D55E00",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated time of one step in one precision.

    Args:
      precision: "float32" on the ordinary units, "tf32", "float16" or "bfloat16".
      program: the program that was compiled: "as given", "in float32" or "under autocast".
      seconds: the estimate.
      speedup: the time in float32 over this one.
      bound_by: the part with most of the time: "compute", "memory", "launches" or "communication".
    """

    precision: str
    program: str
    seconds: float
    speedup: float
    bound_by: str


def estimates(programs: Mapping[str, tuple[str, Sequence[Kernel]]], target: Target) -> tuple[Estimate, ...]:
    """Estimates the time of a step in each precision.

    Args:
      programs: the program that was compiled and its kernels, by precision; "float32" stands for TF32 too.
      target: the card.
    """
    if not target.rates:
        return ()
    found: list[Estimate] = []
    for name, (program, kernels) in programs.items():
        has_tf32 = name == "float32" and "tf32" in target.on_tensor_cores
        for precision in (name, "tf32") if has_tf32 else (name,):
            parts: Any = Counter()
            for kernel in kernels:
                seconds, bound = kernel_seconds(kernel, target, exact=precision == "float32")
                parts[bound] += kernel.times * seconds
                parts["launches"] += kernel.times * target.launch_seconds
            if total := parts.total():
                bound = max(parts, key=parts.__getitem__)
                found.append(Estimate(precision, program, total, 0.0, bound))
    base = next((e.seconds for e in found if e.precision == "float32"), 0.0)
    return tuple(dataclasses.replace(e, speedup=base / e.seconds) for e in found)


def kernel_seconds(kernel: Kernel, target: Target, exact: bool = False) -> tuple[float, str]:
    """The time of one run of a kernel without its launch, and what bounds it.

    Args:
      kernel: any.
      target: the card.
      exact: whether float32 products run on the ordinary units, and not as TF32.
    """
    memory = kernel.bytes / target.bandwidth
    if kernel.collective:
        share = _SENT.get(kernel.collective, lambda n: 1)(kernel.group)
        return max(kernel.bytes_read * share / target.link, memory), "communication"
    arithmetic = _roof(kernel)
    if exact and arithmetic == "tf32":
        arithmetic = "float32"
    compute = kernel.flops / target.rate(arithmetic)
    return (compute, "compute") if compute > memory else (memory, "memory")


def plot_roofline(kernels: Sequence[Kernel], target: Target, title: str, pyplot: Any) -> Any:
    """Plots the matrix kernels under the roofs of the card: FLOPs per byte against FLOPs per second.

    Kernels stand where their estimated time puts them, which is on a roof: the picture shows on which, and
    how far memory bandwidth keeps them below the peak rate of the arithmetic.
    """
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    products = [kernel for kernel in kernels if kernel.flops and kernel.bytes]
    used = dict.fromkeys(map(_roof, products))
    knees = [target.rate(roof) / target.bandwidth for roof in ("float32", "float16", *used)]
    reached = [kernel.flops / kernel.bytes for kernel in products]
    ends = min(*reached, *knees) / 4, 4 * max(*reached, *knees)
    slope = [ends[0], max(knees)]
    label = f"memory: {target.bandwidth / 1e12:.3g} TB/s"
    axes.plot(slope, [x * target.bandwidth for x in slope], color="#999999", label=label)
    # Float16 and bfloat16 mostly have one roof.
    roofs: dict[float, list[str]] = {}
    for arithmetic in dict.fromkeys(("float32", "tf32", "float16", "bfloat16", *used)):
        if arithmetic in target.rates:
            roofs.setdefault(target.rate(arithmetic), []).append(arithmetic)
    for rate, names in roofs.items():
        label = f"{', '.join(names)}: {rate / 1e12:.4g} TFLOP/s"
        axes.plot([rate / target.bandwidth, ends[1]], [rate, rate], color=_COLOURS.get(names[0]), label=label)
    for arithmetic in used:
        some = [kernel for kernel in products if _roof(kernel) == arithmetic]
        rates = [kernel.flops / kernel_seconds(kernel, target)[0] for kernel in some]
        label = f"{len(some)} matrix kernels in {arithmetic}"
        intensities = [kernel.flops / kernel.bytes for kernel in some]
        axes.scatter(intensities, rates, alpha=0.8, color=_COLOURS.get(arithmetic), zorder=3, label=label)
    axes.set(
        xscale="log", yscale="log", xlim=ends, title=title,
        xlabel="operations per byte of memory traffic (FLOP/B)", ylabel="operations per second (FLOP/s)",
    )  # fmt: skip
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def _roof(kernel: Kernel) -> str:
    """The kind of arithmetic that bounds a kernel; the ordinary units' is that of float32."""
    return kernel.arithmetic if kernel.tensor_cores or kernel.arithmetic == "float64" else "float32"


@dataclasses.dataclass(frozen=True)
class Gain:
    """Estimated times of a module, forward and backward, with wider products and with its own.

    Args:
      path: path of the module: "Net/Dense_0".
      precision: the half type of its products, or their float8 recipe.
      before_seconds: time in float32 at JAX's default precision, which is TF32 or a single bfloat16 product
        on the devices that have them; of a recipe, with the products in 16 bits.
      seconds: time as it is; both times by the roofline model, a lower bound.
      saved_seconds: time that its products save.
      added_seconds: time that its other kernels take more: of a recipe, they find scales, round, and scale
        the results.
    """

    path: str
    precision: str
    before_seconds: float
    seconds: float
    saved_seconds: float
    added_seconds: float

    @property
    def speedup(self) -> float:
        """The time before over that as it is; below 1 the module loses."""
        return self.before_seconds / self.seconds


def gains(
    before: Sequence[Kernel], after: Sequence[Kernel], precision: str | Mapping[str, str], target: Target
) -> tuple[Gain, ...]:
    """Estimates what each module gains, those with most time before first.

    Args:
      before, after: kernels of the program with wider products, and of the program.
      precision: the half type; or the recipe of the float8 products of a module, by its path: "" for those by
        none.
      target: the device; without known rates there is no estimate.
    """
    if not target.rates:
        return ()
    wide, own = _by_path(before, target), _by_path(after, target)
    products = [_by_path([k for k in kernels if k.flops], target) for kernels in (before, after)]
    found = []
    for path, seconds in wide.most_common():
        chosen = precision if isinstance(precision, str) else precision.get(path)
        # A module, or its product, of only one of the programs was fused with its neighbours in the other.
        compared = [own] if isinstance(precision, str) else products
        if path and chosen and all(part[path] for part in compared):
            saved = products[0][path] - products[1][path]
            added = saved - (seconds - own[path])
            found.append(Gain(path, chosen, seconds, own[path], saved, added))
    return tuple(found)


def _by_path(kernels: Sequence[Kernel], target: Target) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for kernel in kernels:
        time = kernel_seconds(kernel, target)[0] + target.launch_seconds
        seconds[kernel.path] += kernel.times * time  # type: ignore[assignment]
    return seconds
