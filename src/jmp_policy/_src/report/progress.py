"""Shows on a terminal how far a report is, once it has taken five seconds, and ends it early on Ctrl-C.

It also keeps `jax_debug_nans` from ending a report: a NaN in what is run is its finding. And it shows equal
warnings once: a report traces its function several times.
"""

import contextlib
import contextvars
import dataclasses
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax

from jmp_policy._src.core.report_base import MISSING

T = TypeVar("T")

#: Seconds before anything is shown.
_PATIENCE = 5.0


@dataclasses.dataclass
class _Running:
    """A report that is being made: its name, its line on stderr as rich shows it, and what is being done."""

    report: str
    line: Any = None
    task: Any = None
    step: str = "the start"


_CURRENT: contextvars.ContextVar[_Running | None] = contextvars.ContextVar("progress", default=None)


@contextlib.contextmanager
def showing(report: str) -> Iterator[None]:
    """Shows the steps of a with-block; of one inside another, and without a terminal, nothing of its own.

    Args:
      report: name of the function that the user called.
    """
    if _CURRENT.get() is not None:
        yield
        return
    running = _Running(report)
    token, missing = _CURRENT.set(running), MISSING.set(())
    try:
        line = _line(running) if sys.stderr.isatty() else contextlib.nullcontext()
        with line, _each_warning_once(), jax.debug_nans(False), jax.debug_infs(False):
            yield
    finally:
        _CURRENT.reset(token)
        MISSING.reset(missing)


@contextlib.contextmanager
def _each_warning_once() -> Iterator[None]:
    seen, show = set[Any](), warnings.showwarning

    def once(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if (known := (str(message), filename, lineno)) not in seen:
            seen.add(known)
            show(message, category, filename, lineno, *rest)

    with warnings.catch_warnings():
        warnings.showwarning = once
        yield


@contextlib.contextmanager
def _line(running: _Running) -> Iterator[None]:
    from rich import console, progress

    columns = "[progress.description]{task.description}", "{task.fields[steps]}", progress.TimeElapsedColumn()
    shown = console.Console(stderr=True)
    running.line = progress.Progress(*columns, console=shown, transient=True, refresh_per_second=2)
    running.task = running.line.add_task(running.report, total=None, steps="")
    timer = threading.Timer(_PATIENCE, running.line.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        running.line.stop()


def step(what: str, done: int = 1, of: int = 1) -> None:
    """Says what is being done from now on, the how-manieth step it is, and of how many."""
    if (running := _CURRENT.get()) is not None:
        steps = f"{done} of {of}" if of > 1 else ""
        running.step = f"{what} {steps}".strip()
        if running.line is not None:
            running.line.update(running.task, description=f"{running.report}: {what}", steps=steps)


def steps(what: str, items: Sequence[T]) -> Iterator[T]:
    """Iterates over items, each a step."""
    for number, item in enumerate(items, 1):
        step(what, number, len(items))
        yield item


@contextlib.contextmanager
def interruptible(missing: str, known: Sequence[Any] | None = None) -> Iterator[None]:
    """Ctrl-C ends the with-block, and not the report, which says so.

    Args:
      missing: what the report then does not have, as a sentence without its end.
      known: what the block finds out; while it is empty, the report ends too. None if it knows enough.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not known and known is not None:
            raise
        at = "" if (running := _CURRENT.get()) is None else f" at {running.step}"
        MISSING.set((*MISSING.get(), f"Interrupted{at}: {missing}."))
