"""Lists the kernels of an optimised program (products, fusions, copies, collectives), with their time.

That is estimated, as if every kernel ran at the peak rate of the card's units or memory: S. Williams,
A. Waterman, D. Patterson, Roofline: An Insightful Visual Performance Model (2009), by kernel, plus the time
to launch each. Real kernels stay below those rates, so that the times are lower bounds.

A module is the kernels whose operations have its name. The compiler fuses across modules and names a fusion
after one of its operations, so that neighbours share what lies between them.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jmp_policy._src.core.targets import Target
from jmp_policy._src.jaxpr.calls import KINDS
from jmp_policy._src.jaxpr.walk import Placed
from jmp_policy._src.policy.marked_regions import is_marker
from jmp_policy._src.report.lowering import hlo
from jmp_policy._src.report.lowering.products import Product, Products, dtype_name, fusion_kind

_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_TRANSFORM = re.compile(r"(\w+)\(([^()]*)\)")
#: Parts of an operation's name that JAX adds, and not the user.
_MACHINERY = frozenset(KINDS) | {
    *("call_exported", "body", "remat", "rematted_computation", "pjit", "eval_jaxpr"),
}


@dataclasses.dataclass(frozen=True)
class Kernel(Placed):
    """Kernel of a compiled program, or a collective; on a TPU, a fusion or an operation of its own.

    Args:
      name: name that the compiler gave it.
      kind: "cublaslt", "cublas", "cudnn", "triton", "fusion", "reduction", "copy", "collective" or
        "custom call"; of other instructions, their opcode.
      path: path of the module that it belongs to, from the scopes around its operation: "Net/Dense_0".
      backward: whether it is part of a backward pass.
      line: source line of its operation: "mlp.py:41".
      times: how often one run of the program runs it.
      counted: whether `times` is exact; not so in a loop with an unknown number of trips.
      bytes_read, bytes_written: bytes of memory traffic of one run of it.
      flops: operations of a matrix product or convolution, of one run of it; 0 for all other kernels.
      operands: dtypes of a product's operands, "float16 x float16", or of the arrays that a collective sends.
      result, accumulation: dtypes of a product's result and sums.
      arithmetic: a product's kind of arithmetic, which decides the rate: "float16", "tf32", "float32", ...
      tensor_cores: whether Tensor Cores compute it; the matrix units, in a TPU.
      size: a product's size, m x n x k: "512x256x1024"; "4*512x256x1024" for a batch of 4, or where the sum
        is split in four.
      alignment: a product's alignment to 16 bytes: "aligned" or "unaligned"; in a TPU, of its columns and its
        sums to 128 elements.
      collective: "all-reduce", ... or "".
      group: number of devices in a collective's group.
    """

    name: str
    kind: str
    path: str = ""
    backward: bool = False
    line: str = ""
    times: int = 1
    counted: bool = True
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    operands: str = ""
    result: str = ""
    accumulation: str = ""
    arithmetic: str = ""
    tensor_cores: bool = False
    size: str = ""
    alignment: str = ""
    collective: str = ""
    group: int = 1

    @property
    def bytes(self) -> int:
        """The bytes read and written by one run."""
        return self.bytes_read + self.bytes_written

    @property
    def place(self) -> str:
        """Formats path and line, as messages show them: "Net/head (mlp.py:41)"."""
        return super().place if self.path or self.line else self.name


def kernels_of(text: str, target: Target) -> tuple[Kernel, ...]:
    """The kernels of an optimised HLO module, in the order of their computations.

    Args:
      text: text of the module.
      target: the device that it was compiled for.
    """
    computations, entry = hlo.parse(text)
    sources, products = hlo.Sources(text), Products(computations, target)
    traffic = hlo.Traffic(computations, on_chip=target.platform != "tpu")

    def kernel_of(instruction: hlo.Instruction, scope: hlo.Scope, runs: hlo.Runs) -> Kernel:
        inner, made = hlo.inside(instruction, computations), list[Product]()
        fields: dict[str, Any]
        if collective := _collective(instruction, inner):
            fields = _collective_fields(collective, scope if collective is instruction else inner)
        else:
            read, written = traffic.of(instruction, scope)
            fields = {"kind": _kind(instruction), "bytes_read": read, "bytes_written": written}
            made = products.of(instruction, scope)
        op_name, shown = max(made, key=lambda product: product[1]["flops"], default=("", {}))
        path, backward = module_path(op_name or instruction.op_name)
        named = instruction
        if shown and not path:
            path, backward, named = _path_of_operands(instruction, scope)
        fields |= shown | {"flops": sum(product["flops"] for _, product in made)}
        place = {"path": path, "backward": backward, "line": sources.line(named)}
        return Kernel(name=instruction.name, **runs._asdict(), **place, **fields)

    found = []
    for name, runs in hlo.executed(computations, entry).items():
        scope = {i.name: i for i in computations[name]}
        launched = [i for i in computations[name] if i.opcode not in hlo.NO_KERNEL | hlo.CONTAINERS]
        found += [kernel_of(instruction, scope, runs) for instruction in launched]
    return tuple(found)


def _path_of_operands(product: hlo.Instruction, scope: hlo.Scope) -> tuple[str, bool, hlo.Instruction]:
    """Path, pass and source of a product that XLA gave no name, as of scaled ones: those of an operand."""
    operands = [scope[name] for name in product.operands if name in scope]
    made = [one for one in operands if one.opcode not in hlo.NO_KERNEL]
    found = [(*module_path(operand.op_name), operand) for operand in made]
    return max(found, key=lambda of: (bool(of[0]), of[1]), default=("", False, product))


def partitions(text: str) -> int:
    """The number of devices that an HLO module is for."""
    match = re.search(r"\bnum_partitions=(\d+)", text.partition("\n")[0])
    return int(match.group(1)) if match else 1


def module_path(op_name: str) -> tuple[str, bool]:
    """The module path in an operation's name, and whether it belongs to a backward pass.

    "jit(step)/transpose(jvp(Net))/Dense_0/dot_general" belongs to "Net/Dense_0", and is backward.
    """
    backward = "transpose(" in op_name
    while match := _TRANSFORM.search(op_name):
        kept = "" if match.group(1) in ("jit", "pjit") else match.group(2)
        op_name = op_name[: match.start()] + kept + op_name[match.end() :]
    parts = [
        part
        for part in op_name.split("/")[:-1]
        if part
        and part not in _MACHINERY
        and not is_marker(part)
        # Branches of conditions, and the scope that `einsum` adds.
        and not re.search(r"^branch_\d+_fun|->", part)
    ]
    return "/".join(parts), backward


def _collective_fields(collective: hlo.Instruction, scope: hlo.Scope) -> dict[str, Any]:
    sent = [scope[name].shape for name in collective.operands if name in scope]
    dtypes = dict.fromkeys(dtype_name(dtype) for shape in sent for dtype, _ in hlo.arrays(shape))
    size = sum(map(hlo.shape_bytes, sent))
    return {
        "kind": "collective",
        "bytes_read": size,
        "bytes_written": size,
        "operands": ", ".join(dtypes),
        "collective": collective.opcode.removesuffix("-start"),
        "group": _group(collective),
    }


def _kind(instruction: hlo.Instruction) -> str:
    written_by = instruction.attribute("custom_call_target") + fusion_kind(instruction)
    for word in ("cublas$lt", "cublas", "cudnn", "triton"):
        if word in written_by:
            return word.replace("$", "")
    kinds = {"copy-start": "copy", "slice-start": "copy", "reduce": "reduction", "custom-call": "custom call"}
    fusion = "reduction" if instruction.attribute("kind") == "kInput" else "fusion"
    kinds |= {"fusion": fusion, "fusion-start": fusion}
    return kinds.get(instruction.opcode, instruction.opcode)


def _collective(instruction: hlo.Instruction, inner: hlo.Scope) -> hlo.Instruction | None:
    """The collective that an instruction is or begins, if any.

    A TPU begins one in a fusion, goes on with it in fusions that compute something else, and ends it in one.

    Args:
      instruction: any.
      inner: instructions of the computation that it calls, by name.
    """
    if instruction.opcode not in ("fusion", "async-start"):
        return instruction if instruction.opcode.removesuffix("-start") in _COLLECTIVES else None
    found = next((i for i in inner.values() if i.opcode.removesuffix("-start") in _COLLECTIVES), None)
    targets = [i.attribute("custom_call_target") for i in inner.values()]
    parts = {target for target in targets if target.startswith("AsyncCollective")}
    goes_on = any("async_collective_fusion" in name for name in instruction.called)
    if goes_on or (parts and "AsyncCollectiveStart" not in parts):
        return None
    if found is not None and found.opcode == "all-reduce" and "all-reduce-scatter" in instruction.line:
        # A sum of which each device keeps its part.
        return found._replace(opcode="reduce-scatter")
    return found


def _group(instruction: hlo.Instruction) -> int:
    """The size of a group from `{{0,1},{2,3}}`, `[2,4]<=[8]` or `mesh['a'=2,'b'=4] {'b'}`."""
    text = instruction.line.partition("replica_groups=")[2]
    if text.startswith("mesh["):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", text[: text.find("]")]))
        names = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", text[text.find("]") :].partition("}")[0])
        return math.prod(int(part or sizes.get(name, 1)) for name, part in names)
    match = re.match(r"\[\d+,(\d+)\]|\{\{([\d,]+)\}", text)
    size, devices = match.groups() if match else ("1", "")
    return int(size) if size else len(devices.split(","))


#: Data that a ring collective sends over a link, as a multiple of its operand, by number of devices.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    **dict.fromkeys(("reduce-scatter", "all-to-all", "ragged-all-to-all"), lambda n: (n - 1) / n),
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
    marked = [*knees, *(kernel.flops / kernel.bytes for kernel in products)]
    ends = min(marked) / 4, 4 * max(marked)
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
