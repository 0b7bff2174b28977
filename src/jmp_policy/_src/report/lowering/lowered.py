"""Defines the report on a program compiled for a GPU or TPU: its tables, its plot and its verdict."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jmp_policy._src.core.report_base import Report, Sum, Table, bytes_text, joined, joined_places, plotting
from jmp_policy._src.core.targets import TARGETS, Target, target_of_device
from jmp_policy._src.report.lowering.kernels import Estimate, Gain, Kernel, kernel_seconds, plot_roofline
from jmp_policy._src.report.lowering.products import FEW_BITS

HALVES = ("float16", "bfloat16")
#: What the program is called whose products are in half where the given one has them in float8 by recipes.
WITHOUT_RECIPE = "without recipes"
#: Number of runs whose median is the measured time.
RUNS = 10
_ESTIMATES = "Estimated time of one run (roofline, not measured; a lower bound)"
_LAYERS = "Estimated time by module, forward and backward (roofline; float32 at JAX's default precision)"
_RECIPES = "Estimated time by module with float8 products, forward and backward (roofline)"
_PARTS = "products save ", "rounding adds "


@dataclasses.dataclass(frozen=True)
class LoweringReport(Report):
    """Report on a program as XLA's compiler for a GPU or TPU makes it.

    Args:
      function: name of the function.
      target: the device: "H100", "v5e:2x4", or the name that the device of this machine gives itself.
      devices: number of devices that it runs on; everything else is per device.
      kernels: all kernels.
      argument_bytes, output_bytes, temp_bytes: bytes of memory.
      estimates: estimated time of one run, per precision; by the roofline model, not measured.
      measured_seconds: time of one run, on a real device; None where nothing ran.
      notes: what the report cannot know; precisions that could not be estimated, and why.
      verdict: the report in one line.
      peak_bytes: the most memory in use at a time, arguments and results included; 0 where the compiler does
        not say. On TPUs `temp_bytes` is often 0 although memory is used: compare this instead.
      float32_temp_bytes, float32_peak_bytes: the same of the program in float32; None if it did not compile.
      layers: estimated gain of each module from half precision, at these shapes on this device.
      recipes: estimated gain of each module from its float8 recipe, against the same program without recipes.

    Example:
      >>> from jmp_policy import lowering_report
      >>> report = lowering_report(step, params, batch, target="H100")  # doctest: +SKIP
      >>> report.verdict, report.temp_bytes  # doctest: +SKIP
      >>> report.plot().savefig("roofline.png")  # doctest: +SKIP
    """

    function: str
    target: str
    devices: int
    kernels: tuple[Kernel, ...]
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    estimates: tuple[Estimate, ...]
    measured_seconds: float | None
    notes: tuple[str, ...]
    verdict: str
    peak_bytes: int = 0
    float32_temp_bytes: int | None = None
    float32_peak_bytes: int | None = None
    layers: tuple[Gain, ...] = ()
    recipes: tuple[Gain, ...] = ()

    _rows = "kernels"

    @property
    def matrix_kernels(self) -> tuple[Kernel, ...]:
        """The kernels of matrix products and convolutions."""
        return tuple(kernel for kernel in self.kernels if kernel.flops)

    @property
    def collectives(self) -> tuple[Kernel, ...]:
        """The collectives: `operands` are the dtypes that they send, `bytes_read` the size."""
        return tuple(kernel for kernel in self.kernels if kernel.collective)

    @property
    def kernel_count(self) -> int:
        """The number of kernels that one run launches; on a TPU, of fusions, copies and the like."""
        return sum(kernel.times for kernel in self.kernels)

    @property
    def bytes_read(self) -> int:
        """The bytes that all kernels of one run read."""
        return sum(kernel.times * kernel.bytes_read for kernel in self.kernels)

    @property
    def bytes_written(self) -> int:
        """The bytes that all kernels of one run write."""
        return sum(kernel.times * kernel.bytes_written for kernel in self.kernels)

    def plot(self) -> Any:
        """Plots the roofline of the device with the program's matrix kernels under it.

        Returns:
          A matplotlib `Figure`.

        Raises:
          ImportError: when matplotlib is not installed.
          ValueError: when the rates of the device are not known.
        """
        target = target_of_device(self.target)
        if target is None:
            raise ValueError(f"The rates of {self.target!r} are not known. Known: {', '.join(TARGETS)}.")
        title = f"{self.function} on {self.target}: estimated, not measured"
        return plot_roofline(self.kernels, target, title, plotting("LoweringReport.plot"))

    def _tables(self) -> list[Table]:
        collectives = [
            [k.collective, k.operands, bytes_text(k.bytes_read), k.group, k.times, k.place]
            for k in self.collectives
        ]
        times = [
            [e.precision, e.program, _seconds_text(e.seconds), f"{e.speedup:.2f}x", e.bound_by]
            for e in self.estimates
        ]
        columns = ["collective", "dtypes", "size ", "devices ", "runs ", "where"]
        tables = [
            Table(columns, collectives, "Collectives"),
            Table(["products in", "program", "time ", "over float32 ", "bound by"], times, _ESTIMATES),
            _gains_table(self.layers, _LAYERS, ["module", "in", "float32 ", "in half "]),
            _gains_table(self.recipes, _RECIPES, ["module", "recipe", "16 bits ", "float8 ", *_PARTS]),
        ]
        return [_products_table(self), *(table for table in tables if table.rows)]

    def _lines(self) -> list[str]:
        uncounted = sum(not kernel.counted for kernel in self.kernels)
        loops = f", {uncounted} of them in loops of unknown length, counted once" if uncounted else ""
        count = self.kernel_count
        per_device = f" on each of {self.devices} devices" if self.devices > 1 else ""
        lines = [
            f"{count} kernel{'s' * (count != 1)}{per_device}{loops}: {bytes_text(self.bytes_read)} read, "
            f"{bytes_text(self.bytes_written)} written.",
            _memory_line(self),
        ]
        if calls := dict.fromkeys(kernel.name for kernel in self.kernels if kernel.kind == "custom call"):
            lines.append(f"The estimates know the traffic but not the arithmetic of {joined(list(calls))}.")
        if self.measured_seconds is not None:
            lines.append(f"Measured: {_seconds_text(self.measured_seconds)} (median of {RUNS} runs).")
        return [*lines, *self.notes, self.verdict]


def _memory_line(report: LoweringReport) -> str:
    parts = [f"arguments {bytes_text(report.argument_bytes)}", f"results {bytes_text(report.output_bytes)}"]
    for name, given, float32 in (
        ("temporary", report.temp_bytes, report.float32_temp_bytes),
        ("at most in use", report.peak_bytes, report.float32_peak_bytes),
    ):
        other = f" ({bytes_text(float32)} in float32)" if float32 not in (None, given) else ""
        if given or other or name == "temporary":
            parts.append(f"{name} {bytes_text(given)}{other}")
    return f"Memory: {', '.join(parts)}."


def _gains_table(gains: Sequence[Gain], title: str, columns: Sequence[str]) -> Table:
    """Makes a table of gains by module; with what products save, and rounding adds, if it has the columns."""
    rows = []
    for gain in gains:
        seconds = [gain.before_seconds, gain.seconds, gain.saved_seconds, gain.added_seconds]
        shown = (Sum(part, _seconds_text) for part in seconds[: len(columns) - 2])
        rows.append([gain.path, gain.precision, *shown, f"{gain.speedup:.2f}x"])
    return Table([*columns, "gain "], rows, title, most=5, largest_first=True)


def _products_table(report: LoweringReport) -> Table:
    """Makes the table of products, in which equal products of a module share a row."""
    target = target_of_device(report.target)
    units = "Tensor Cores" if target is None or target.platform == "cuda" else "passes"
    columns = ["module", "pass", "by", "size ", "operands -> sums", units, "alignment", "runs ", "us "]
    runs, seconds = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for kernel in report.matrix_kernels:
        row = (
            kernel.path or kernel.place,
            "backward" if kernel.backward else "forward",
            kernel.kind,
            kernel.size,
            f"{' x '.join(dict.fromkeys(kernel.operands.split(' x ')))} -> {kernel.accumulation}",
            kernel.arithmetic if kernel.tensor_cores else "no",
            kernel.alignment,
        )
        runs[row] += kernel.times
        if target is not None:
            seconds[row] += 1e6 * kernel.times * kernel_seconds(kernel, target)[0]  # type: ignore[assignment]
    rows = [
        [*row, Sum(count), Sum(seconds[row], "{:.3g}".format) if seconds else ""]
        for row, count in runs.items()
    ]
    title = f"Matrix kernels of {report.function} on {report.target} (us: all runs, at best)"
    if all(row[6] == "aligned" for row in rows):
        columns, *rows = ([*row[:6], *row[7:]] for row in (columns, *rows))
    return Table(columns, rows, title, most=8)


def _seconds_text(seconds: float) -> str:
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds * 1e3 >= 1 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


def verdict_of(
    kernels: Sequence[Kernel],
    found: Sequence[Estimate],
    target: Target | None = None,
    recipes: Sequence[Gain] = (),
) -> str:
    """The report in one line: modules whose products are not fast, and the estimated speed.

    Args:
      kernels: those of the program.
      found: estimates.
      target: the card; a half type that its Tensor Cores don't have is not recommended.
      recipes: what modules gain by their recipes.
    """
    units = target.matrix_units if target is not None else "Tensor Cores"
    products = [kernel for kernel in kernels if kernel.flops]
    if not products:
        return "No matrix kernels."
    fast = [kernel for kernel in products if kernel.tensor_cores]
    on = Counter(kernel.arithmetic for kernel in fast)
    counts = ", ".join(f"{count} in {arithmetic}" for arithmetic, count in on.most_common())
    how = f" ({counts})" if len(on) > 1 else f" in {next(iter(on))}" if on else ""
    parts = [f"{len(fast)} of {len(products)} matrix kernels on {units}{how}"]
    groups = {
        f"not on {units}": [kernel for kernel in products if not kernel.tensor_cores],
        "left in float32": [k for k in fast if set(HALVES) & set(on) and _is_float32(k)],
        "unaligned": [kernel for kernel in fast if kernel.alignment == "unaligned"],
    }
    for what, some in groups.items():
        if some:
            parts.append(f"{what}: {joined_places(kernel.place for kernel in some)}")
    known = [half for half in HALVES if target is None or half in target.on_tensor_cores]
    given = {e.precision for e in found if e.program == "as given"}
    given |= {word for k in products for word in (k.arithmetic, *k.operands.split(" x "))}
    if target is not None and known and (missing := [h for h in HALVES if h in given and h not in known]):
        has = "has no Tensor Cores for" if target.platform == "cuda" else "has no arithmetic for"
        parts.append(f"{target.name} {has} {missing[0]}: use {known[0]}")
    if losing := [layer for layer in recipes if layer.speedup < 1]:
        better = f"{losing[0].precision}@{target.name}" if target is not None else "another recipe"
        parts.append(f"slower by their recipe: {joined([p.path for p in losing])} ({better} leaves such out)")
    return "; ".join([*parts, *_estimated(found, known)]) + "."


def _is_float32(kernel: Kernel) -> bool:
    """Whether a product of float32 operands goes through matrix units, with whatever precision."""
    return kernel.arithmetic == "tf32" or (
        kernel.arithmetic in ("bfloat16", "bfloat16_x3", "float32") and kernel.operands == "float32 x float32"
    )


def _estimated(found: Sequence[Estimate], known: Sequence[str]) -> list[str]:
    """Describes the speed of the given program in half precision, or else of the best one under autocast.

    Args:
      found: estimates.
      known: half types that Tensor Cores of the card have.
    """
    by_precision = {estimate.precision: estimate for estimate in found}
    halves = [by_precision[half] for half in HALVES if half in by_precision]
    given = [estimate for estimate in halves if estimate.program == "as given"]
    given = given or [estimate for estimate in halves if estimate.precision in known]
    plain = next((estimate for estimate in halves if estimate.program == WITHOUT_RECIPE), None)
    few = next((by_precision[kind] for kind in FEW_BITS if kind in by_precision), None)
    if plain is not None and few is not None:
        gain = plain.seconds / few.seconds
        return [f"estimated {gain:.2f}x the speed of the same in {plain.precision}, {WITHOUT_RECIPE}"]
    if not given or "float32" not in by_precision:
        return []
    best = max(given, key=lambda estimate: estimate.speedup)
    text = f"estimated {best.speedup:.2f}x the speed of float32"
    if "tf32" in by_precision:
        # Float32 programs run as TF32 there, unless jax_default_matmul_precision says otherwise.
        text += f" and {best.speedup / by_precision['tf32'].speedup:.2f}x of tf32, JAX's default,"
    under = "" if best.program == "as given" else f" {best.program}"
    bound = "" if best.bound_by == "compute" else f", bound by {best.bound_by}"
    return [f"{text} in {best.precision}{under}{bound}"]
