"""One way to declare a table: what measures its rows, and how `results/<name>.json` keeps them.

    TABLES = (Table("zoo_gpu", rows, by={"model": MODELS}, size="full", about={"target": H100}),)

`python -m benchmarks zoo_gpu` calls `rows(model, "full")` for every model and saves after each. With words,
as in `python -m benchmarks zoo_gpu GPT-2`, it measures these values only, and the other rows stay as they
were. With a size in front, as in `python -m benchmarks zoo_gpu tiny GPT-2`, it shows the rows and saves
nothing. What pages say of the file is in `benchmarks/pages`.
"""

import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table as Printed

import jmp_policy
from benchmarks.models import SIZES

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")

Rows = list[dict[str, Any]]
#: A value of each column in `Table.by`.
Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of measured numbers.

    Args:
      name: of the table and its file.
      rows: of one value of each column in `by`, at the size if there is one; without columns, of the words of
        the command. It gives a list, or a dict of "rows" and what else the file is to hold.
      by: columns that are measured value by value -> their values in the order of the file.
      about: what the file says beside its rows.
      size: of the models.
      cpus: virtual CPU devices, if more than one.
      seconds: for all of it, on the device of this machine, which must not be a CPU.
      first: values of the first column to begin with.
    """

    name: str
    rows: Callable[..., Rows | dict[str, Any]]
    by: Mapping[str, Iterable[str]] = dataclasses.field(default_factory=dict)
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: str | None = None
    cpus: int = 1
    seconds: float | None = None
    first: Sequence[str] = ()

    def main(self, words: Sequence[str] = ()) -> None:
        """Measures the rows that the words name, or all."""
        words = list(words)
        size = words.pop(0) if self.size and words and words[0] in SIZES else self.size
        if self.cpus > 1:
            jax.config.update("jax_num_cpu_devices", self.cpus)
        if self.seconds and size == self.size and jax.default_backend() == "cpu":
            print(f"Skipped {self.name}: it wants a GPU; `python -m benchmarks {self.name} tiny` does not.")
            return

        def measured(key: Key) -> Rows | dict[str, Any]:
            return self.rows(*(key if self.by else words), *([size] if size else []))

        try:
            for key, found in within(self.seconds, self.chosen(words), measured):
                beside = found if isinstance(found, dict) else {"rows": found}
                if not beside["rows"]:
                    continue
                rows = [dict(zip(self.by, key, strict=True)) | row for row in beside.pop("rows")]
                if size == self.size:
                    self.save(rows, **beside)
                else:
                    show(f"{self.name}, {size}, {jax.devices()[0].device_kind}", rows)
        except jmp_policy.report.LoweringUnavailableError as error:
            print(f"Skipped {self.name}. {error}")

    def chosen(self, words: Sequence[str]) -> list[Key]:
        """The values to measure: of each column those that the words name, or all."""
        known = {value for values in self.by.values() for value in values}
        if self.by and not known.issuperset(words):
            raise SystemExit(f"{self.name} has no {set(words) - known}; it has {', '.join(sorted(known))}.")
        columns = ([v for v in values if v in words] or list(values) for values in self.by.values())
        return sorted(itertools.product(*columns), key=lambda key: not set(key) & set(self.first))

    def save(self, new: Rows, **beside: Any) -> None:
        """Writes new rows in the place of those of the same values, and prints all."""
        about = {**self.about, **({"size": self.size} if self.size else {}), **beside}
        values = {column: list(some) for column, some in self.by.items()}
        rows = sorted([*self.kept(new), *new], key=lambda row: [values[c].index(row[c]) for c in values])
        result = {"benchmark": self.name, **environment(), **about, "rows": rows}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        show(self.name, rows)

    def kept(self, new: Rows) -> Rows:
        """The saved rows of other values than those of new ones, with their date and JAX."""
        if not self.by or not (RESULTS / f"{self.name}.json").exists():
            return []
        saved = load(self.name)
        old, now = ({"date": r["date"], "jax": r["versions"]["jax"]} for r in (saved, environment()))
        measured = {} if old == now else old
        again = {tuple(row[column] for column in self.by) for row in new}
        rows = [row for row in saved["rows"] if tuple(row[column] for column in self.by) not in again]
        return [measured | row for row in rows]


def within(
    seconds: float | None, keys: Sequence[Key], measured: Callable[[Key], Any]
) -> Iterator[tuple[Key, Any]]:
    """What is measured of one key after the other; none begins that might not be done in time.

    A device that fails then, most likely for lack of memory, gives a row with the first line of what it says.
    """
    begin, slowest = time.perf_counter(), 0.0
    for i, key in enumerate(keys):
        start = time.perf_counter()
        if i and seconds and start - begin + slowest > seconds:
            print(f"Left for another run: {', '.join(map(' '.join, keys[i:]))}.")
            return
        try:
            found = measured(key)
        except jax.errors.JaxRuntimeError as error:
            if not seconds:
                raise
            found = [{"error": str(error).splitlines()[0][:300]}]
        slowest = max(slowest, time.perf_counter() - start)
        yield key, found


def load(name: str) -> dict[str, Any]:
    """What `results/<name>.json` holds."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def show(name: str, rows: Rows) -> None:
    """Prints the rows as one table; columns are the keys, in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Printed(*columns, title=name)
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        return f"{value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return str(value)


def environment() -> dict[str, Any]:
    """The date, the machine and the versions."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **versions, "jmp_policy": jmp_policy.__version__},
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }


def _cpu() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
