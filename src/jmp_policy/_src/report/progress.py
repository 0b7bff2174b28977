"""Shows on a terminal how far a report is, once it has taken five seconds."""

import contextlib
import contextvars
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

#: Seconds before anything is shown.
_PATIENCE = 5.0


#: The report, its line on stderr as rich shows it, and the line's task.
_CURRENT: contextvars.ContextVar[tuple[str, Any, Any] | None] = contextvars.ContextVar(
    "progress", default=None
)


@contextlib.contextmanager
def showing(report: str) -> Iterator[None]:
    """Shows the steps of a with-block; of one inside another, and without a terminal, nothing of its own.

    Args:
      report: name of the function that the user called.
    """
    if _CURRENT.get() is not None or not sys.stderr.isatty():
        yield
        return
    from rich import console, progress

    columns = "[progress.description]{task.description}", "{task.fields[steps]}", progress.TimeElapsedColumn()
    shown = console.Console(stderr=True)
    line = progress.Progress(*columns, console=shown, transient=True, refresh_per_second=2)
    token = _CURRENT.set((report, line, line.add_task(report, total=None, steps="")))
    timer = threading.Timer(_PATIENCE, line.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        _CURRENT.reset(token)
        timer.cancel()
        line.stop()


def step(what: str, done: int = 1, of: int = 1) -> None:
    """Says what is being done from now on, the how-manieth step it is, and of how many."""
    if (current := _CURRENT.get()) is not None:
        report, line, task = current
        line.update(task, description=f"{report}: {what}", steps=f"{done} of {of}" if of > 1 else "")


def steps(what: str, items: Sequence[T]) -> Iterator[T]:
    """Iterates over items, each a step."""
    for number, item in enumerate(items, 1):
        step(what, number, len(items))
        yield item
