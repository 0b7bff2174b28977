"""Results as JSON files that tell where they came from, and as tables on the terminal."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import jmp_policy

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def save(name: str, rows: list[dict[str, Any]], **about: Any) -> None:
    """Writes `results/<name>.json` and prints the rows."""
    result = {"benchmark": name, **environment(), **about, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    show(name, rows)


def update(name: str, new: list[dict[str, Any]], order: dict[str, Sequence[str]], **about: Any) -> None:
    """Saves new rows beside the saved ones that they do not replace, and prints all.

    Args:
      name: of the benchmark.
      new: rows that were measured now.
      order: columns that tell rows apart, with their values in the order in which rows are listed.
      **about: as for `save`.
    """
    rows = [*kept(name, *order, new=new), *new]
    rows.sort(key=lambda row: [values.index(row[column]) for column, values in order.items()])
    save(name, rows, **about)


def kept(name: str, *columns: str, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved rows of a benchmark that are in the way of none of the new ones, with their date and JAX.

    Args:
      name: of the benchmark.
      columns: a new row takes the place of the old ones that agree with it in these.
      new: rows that were measured now.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    old = json.loads(path.read_text())
    measured = {"date": old["date"], "jax": old["versions"]["jax"]}
    again = {tuple(row[column] for column in columns) for row in new}
    return [measured | row for row in old["rows"] if tuple(row[column] for column in columns) not in again]


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Prints the rows as one table; columns are the keys, in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=name)
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    Console().print(table)


def environment() -> dict[str, Any]:
    """The date, the machine and the versions."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **versions, "jmp_policy": jmp_policy.__version__},
    }


def _cpu() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cell(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        return f"{value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return str(value)
