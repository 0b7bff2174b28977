"""Shows on a terminal how far a report is, once it has taken five seconds."""

import contextlib
import contextvars
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

#: Seconds before anything is shown.
_PATIENCE = 5.0


class _Shown:
    """A line on stderr: the report, what it does, steps done and of how many, seconds."""

    def __init__(self, report: str):
        from rich import console, progress

        columns = ("[progress.description]{task.description}", "{task.fields[steps]}")
        shown = console.Console(stderr=True)
        self._line = progress.Progress(
            *columns, progress.TimeElapsedColumn(), console=shown, transient=True, refresh_per_second=2
        )
        self._report = report
        self._task = self._line.add_task(report, total=None, steps="")
        self._timer = threading.Timer(_PATIENCE, self._line.start)
        self._timer.daemon = True
        self._timer.start()

    def step(self, what: str, done: int, of: int) -> None:
        """Says what is being done, the how-manieth step it is, and of how many."""
        steps = f"{done} of {of}" if of > 1 else ""
        self._line.update(self._task, description=f"{self._report}: {what}", steps=steps)

    def end(self) -> None:
        """Takes the line away."""
        self._timer.cancel()
        self._line.stop()


_CURRENT: contextvars.ContextVar[_Shown | None] = contextvars.ContextVar("progress", default=None)


@contextlib.contextmanager
def showing(report: str) -> Iterator[None]:
    """Shows the steps of a with-block; of one inside another, and without a terminal, nothing of its own.

    Args:
      report: name of the function that the user called.
    """
    if _CURRENT.get() is not None or not sys.stderr.isatty():
        yield
        return
    shown = _Shown(report)
    token = _CURRENT.set(shown)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        shown.end()


def step(what: str, done: int = 1, of: int = 1) -> None:
    """Says what is being done from now on."""
    if (shown := _CURRENT.get()) is not None:
        shown.step(what, done, of)


def steps(what: str, items: Sequence[T]) -> Iterator[T]:
    """Iterates over items, each a step."""
    for number, item in enumerate(items, 1):
        step(what, number, len(items))
        yield item
