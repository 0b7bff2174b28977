"""Finds the device to compile for by the name that a user or the device itself gives."""

import re

from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.core.targets.gpus import GPUS
from jmp_policy._src.core.targets.target import Target
from jmp_policy._src.core.targets.tpus import TPUS, slice_named

#: The devices by name.
TARGETS: dict[str, Target] = {**GPUS, **TPUS}


def find_target(name: str) -> Target:
    """Finds a GPU by its name ("H100"), or a TPU by its version and topology ("v5e", "v5e:2x4").

    Raises:
      ValueError: when there is none.
    """
    if isinstance(name, str):
        gpus = {key.lower(): gpu for key, gpu in GPUS.items()}
        if found := gpus.get(name.lower()) or slice_named(name):
            return found
    known = {key.lower(): key for key in TARGETS}
    hint = did_you_mean(name.lower(), known) if isinstance(name, str) else ""
    for lower, key in known.items():
        hint = hint.replace(f"'{lower}'", f"'{key}'")
    raise ValueError(
        f"Unknown target {name!r}.{hint} Known: {', '.join(TARGETS)}; a slice of TPUs as in 'v5e:2x4'; None "
        "for the device of this machine."
    )


def target_of_device(kind: str) -> Target | None:
    """Finds what a device's kind ("NVIDIA H100 80GB HBM3", "TPU v5 lite") names; None if it is not known."""
    if kind.startswith("TPU"):
        short = kind.replace(" lite", "e")
        return next((tpu for tpu in TPUS.values() if short in (tpu.description.replace(" lite", "e"),
                     f"TPU {tpu.name}")), None)  # fmt: skip
    if kind.partition(":")[0].lower() in TPUS:
        return slice_named(kind)
    words = re.split(r"[ -]", kind.upper())
    return next((gpu for name, gpu in GPUS.items() if name in words), None)
