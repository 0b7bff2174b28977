"""Describes Google's TPUs: slices of them to XLA's compiler, and a device by its peak rates.

Rates and sizes are those of Google's documentation of each version, per chip. The compiler's own
`estimated_cycles` say which arithmetic a product is: in units of a bfloat16 one, they are 1 for float32 and
float16 at JAX's default precision, 3 for "high" and 6 for "highest" (v5e, v6e).
"""

import dataclasses
import math
import re
from typing import Any, ClassVar

from jmp_policy._src.core.targets.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu(Target):
    """Slice of TPUs to compile for; all other numbers are those of one device.

    Args:
      xla_name: XLA's name of the version.
      dimensions: number of dimensions of a slice.
      devices_per_chip: devices of JAX in a chip.
      config: XLA's name of the configuration of a chip; "" for the default.
      chips: shape of the slice; () for one that has as many devices as the program.
    """

    xla_name: str
    dimensions: int
    devices_per_chip: int = 1
    config: str = ""
    chips: tuple[int, ...] = ()

    platform: ClassVar[str] = "tpu"
    matrix_units: ClassVar[str] = "the matrix units"
    #: The whole program is on the chip.
    launch_seconds: ClassVar[float] = 0.0
    options: ClassVar[dict[str, Any]] = {}

    def topology(self, devices: int) -> dict[str, Any]:
        """Returns the arguments of JAX's `get_topology_desc` for a slice of so many devices."""
        chips = self.chips or self._slice(devices)
        # One device of a chip with two may compute alone; a slice that was named is all in use.
        if self.chips and devices != math.prod(chips) * self.devices_per_chip:
            raise ValueError(
                f"{self.name} has {math.prod(chips) * self.devices_per_chip} devices, and the program is for "
                f"{devices}. Give the arguments NamedShardings on a mesh of as many (virtual devices of the "
                f"CPU will do), or name no topology: {self.name.partition(':')[0]!r}."
            )
        made: dict[str, Any] = {
            "platform": "tpu",
            "topology_name": f"{self.xla_name}:{'x'.join(map(str, chips))}",
            # By default a host has 2x2 chips, and smaller slices are refused.
            "chips_per_host_bounds": [math.gcd(size, 2) for size in chips[:2]] + [1],
        }
        return made | ({"chip_config_name": self.config} if self.config else {})

    def _slice(self, devices: int) -> tuple[int, ...]:
        """Returns the usual slice: every dimension is doubled in turn."""
        count = -(-devices // self.devices_per_chip)
        if count & (count - 1):
            raise ValueError(
                f"{self.name} has no usual slice for {devices} devices. Name its topology: "
                f"{self.name + ':' + 'x'.join(['2'] * self.dimensions)!r}, for example."
            )
        sizes = [1] * self.dimensions
        while math.prod(sizes) < count:
            least = min(sizes)
            places = [i for i, size in enumerate(sizes) if size == least]
            sizes[places[0] if least == 1 else places[-1]] *= 2
        return tuple(sizes)


def _rates(bfloat16: float, **others: float) -> dict[str, float]:
    passes = {"bfloat16": bfloat16, "bfloat16_x3": bfloat16 / 3, "float32": bfloat16 / 6}
    return {arithmetic: rate * 1e12 for arithmetic, rate in (passes | others).items()}


_UNITS = frozenset({"bfloat16", "bfloat16_x3", "float32", "int8"})

#: One device of each version, by name. A chip of v4 and v5p is one device of two cores; a chip of v7x is two.
TPUS = {
    tpu.name: tpu
    for tpu in (
        Tpu(
            name="v4", description="TPU v4", xla_name="v4", dimensions=3, config="megacore",
            bandwidth=1228e9, link=150e9, memory=32 * 2**30, on_tensor_cores=_UNITS,
            rates=_rates(275.0, int8=275.0),
        ),
        Tpu(
            name="v5e", description="TPU v5 lite", xla_name="v5e", dimensions=2,
            bandwidth=819e9, link=100e9, memory=16 * 2**30, on_tensor_cores=_UNITS,
            rates=_rates(197.0, int8=393.0),
        ),
        Tpu(
            name="v5p", description="TPU v5", xla_name="v5p", dimensions=3,
            bandwidth=2765e9, link=300e9, memory=95 * 2**30, on_tensor_cores=_UNITS,
            rates=_rates(459.0, int8=918.0),
        ),
        Tpu(
            name="v6e", description="TPU v6 lite", xla_name="v6e", dimensions=2,
            bandwidth=1640e9, link=224e9, memory=32 * 2**30, on_tensor_cores=_UNITS,
            rates=_rates(918.0, int8=1836.0),
        ),
        Tpu(
            name="v7x", description="TPU7x", xla_name="tpu7x", dimensions=3, devices_per_chip=2,
            bandwidth=3690e9, link=300e9, memory=96 * 2**30, on_tensor_cores=_UNITS | {"float8"},
            rates=_rates(1153.5, float8=2307.0),
        ),
    )
}  # fmt: skip


def slice_named(name: str) -> Tpu | None:
    """Returns the slice that "v5e:2x4" names, or "v5e" without a shape; None if it is no version of a TPU.

    Raises:
      ValueError: when the shape is none of such a slice.
    """
    version, _, shape = name.lower().partition(":")
    if version not in TPUS:
        return None
    tpu = TPUS[version]
    if not shape:
        return None if ":" in name else tpu
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape) or shape.count("x") + 1 != tpu.dimensions:
        example = "x".join(["2"] * tpu.dimensions)
        raise ValueError(
            f"Unknown topology {shape!r} of a slice of {version}: its chips lie in {tpu.dimensions} "
            f"dimensions, as in '{version}:{example}'."
        )
    chips = tuple(map(int, shape.split("x")))
    return dataclasses.replace(tpu, name=f"{version}:{shape}", chips=chips)
