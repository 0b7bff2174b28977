"""A row of the table of faults: a fault, what is expected, and how often it happened."""

import dataclasses
from typing import Literal

#: How a run with a fault ends. Survived: with the state that it should have. Refused: with an error that
#: names the fault. Lost: with something else, or with less than it had.
End = Literal["survived", "refused", "lost"]


@dataclasses.dataclass
class Row:
    """A fault, what is expected, and how its runs ended.

    Args:
      fault, expected: for the reader.
      ends: how a run ends that goes as expected.
    """

    fault: str
    expected: str
    ends: End = "survived"
    runs: int = 0
    steps: int = 0
    skipped: int = 0
    as_expected: int = 0
    survived: int = 0
    refused: int = 0
    lost: int = 0
    slowest: float | None = None  # Seconds of the slowest run, where it is to be below one.
    identical: int | None = None  # Runs whose other steps give the very bits of the run without the fault.
    unexpected: list[str] = dataclasses.field(default_factory=list)

    def count(
        self, run: str, held: dict[str, bool], steps: int = 0, skipped: int = 0, ends: End | None = None
    ) -> None:
        """Adds a run; `same bits` is counted on its own, what else doesn't hold is named."""
        self.steps += steps
        self.skipped += skipped
        if "same bits" in held:
            self.identical = (self.identical or 0) + held["same bits"]
        failed = [name for name, holds in held.items() if not holds and name != "same bits"]
        self.unexpected += [f"{run}: {name}" for name in failed]
        self.count_many(1, bool(failed), ends)

    def count_many(self, runs: int, wrong: int, ends: End | None = None) -> None:
        """Adds runs of which some were not as expected."""
        self.runs += runs
        self.as_expected += runs - wrong
        self.lost += wrong
        setattr(self, ends or self.ends, getattr(self, ends or self.ends) + runs - wrong)

    def timed(self, seconds: float) -> dict[str, bool]:
        """What must hold of the time of a run."""
        self.slowest = max(self.slowest or 0.0, round(seconds, 3))
        return {"within a second": seconds < 1}
