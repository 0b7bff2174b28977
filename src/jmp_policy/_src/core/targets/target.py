"""Defines what the reports know of a device to compile for, of whatever kind."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class Target:
    """Device to compile for.

    Args:
      name: name that users give.
      description: name that the device gives itself.
      bandwidth: bandwidth of its memory, bytes per second.
      link: bandwidth to the other devices, bytes per second in one direction.
      memory: size in bytes.
      rates: operations per second by arithmetic: "float64", "float32", "tf32", "float16", "bfloat16",
        "bfloat16_x3", "float8", "int8", where it has them. "float32" is exact: of a GPU's ordinary units, or
        of six bfloat16 products each in a TPU.
      on_tensor_cores: kinds of arithmetic that its matrix units do; "mxfp8" where they take the scales of
        blocks of float8 values, which others multiply in bfloat16.

    Attributes:
      platform: JAX's name of the kind of device.
      matrix_units: what its matrix units are called.
      launch_seconds: time between one kernel and the next.
      options: options of the compiler.
    """

    name: str
    description: str
    bandwidth: float
    link: float
    memory: int
    rates: Mapping[str, float]
    on_tensor_cores: frozenset[str]

    platform: ClassVar[str]
    matrix_units: ClassVar[str]
    launch_seconds: ClassVar[float]
    options: ClassVar[dict[str, Any]]

    def rate(self, arithmetic: str) -> float:
        """Returns operations per second; arithmetic without faster units runs at the rate of float32."""
        return self.rates.get(arithmetic, self.rates["float32"])

    def topology(self, devices: int) -> dict[str, Any]:
        """Returns the arguments of JAX's `get_topology_desc` for so many devices.

        Raises:
          ValueError: when there is no such arrangement of devices.
        """
        raise NotImplementedError
