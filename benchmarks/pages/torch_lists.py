"""PyTorch's autocast lists, from the header in its wheel: `python -m benchmarks torch_lists WHEEL`.

`pip download --no-deps torch==2.9.1` brings the wheel; nothing of it is installed. The one operation that
CUDA's autocast refuses is registered in a source file that no wheel holds.
"""

import re
import zipfile
from typing import Any

from benchmarks.table import Table

HEADER = "torch/include/ATen/autocast_mode.h"
#: List -> macros of the header that hold it.
MACROS = {
    "half": ("LOWER_PRECISION_FP",),
    "float32": ("FP32", "FP32_SET_OPT_DTYPE", "DIFFERENT_REDISPATCH_SIGNATURE"),
    "widest": ("PROMOTE",),
}
REFUSED = ("binary_cross_entropy",)


def operations(header: str, macro: str) -> list[str]:
    """Names of the operations that a macro lists, overloads once."""
    (body,) = re.findall(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", header)
    return list(dict.fromkeys(re.findall(r"\b_\((?:ADD_NS\()?(\w+)", body)))


def rows(wheel: str) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as archive:
        header = archive.read(HEADER).decode()
    found = {of: [name for m in macros for name in operations(header, m)] for of, macros in MACROS.items()}
    found["refused"] = list(REFUSED)
    version = re.findall(r"torch-([\d.]+)", wheel)[-1]
    return {
        "rows": [{"list": of, "operations": " ".join(names)} for of, names in found.items()],
        "torch": version,
    }


TABLES = (Table("torch_lists", rows),)
