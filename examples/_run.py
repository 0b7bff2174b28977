"""What the examples share, which is nothing about precision: arguments, a progress bar, and how they end."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress


class Arguments(argparse.ArgumentParser):
    """`--steps`, `--seed` and `--quiet`, for `compare(steps, seed, quiet)`; an example may add its own."""

    def __init__(self, description: str, steps: int):
        super().__init__(description=description)
        self.add_argument(
            "--steps", type=int, default=steps, help=f"train steps of each run (default: {steps})"
        )
        self.add_argument("--seed", type=int, default=0, help="of all random numbers (default: 0)")
        self.add_argument("--quiet", action="store_true", help="only the results: no words, no progress bar")

    def parse_args(self, argv: Sequence[str] | None = None) -> Any:  # type: ignore[override]
        options = super().parse_args(argv)
        if options.steps < 10:
            self.error(f"--steps must be at least 10, got {options.steps}")
        if not 0 <= options.seed < 2**32:
            self.error(f"--seed must be at least 0 and below 2**32, got {options.seed}")
        return options


def progress_bar(console: Console, quiet: bool) -> Progress:
    """A bar for each run, if somebody looks: not in a file or a pipe."""
    return Progress(console=console, disable=quiet or not console.is_terminal)


def finish(failure: str | None) -> int:
    """The exit status of an example; says why its comparison failed."""
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0


def compare(
    train: Callable[[str, int, int], float], description: str, steps: int, tolerance: float, argv: Any = None
) -> int:
    """Trains with each word for a precision, prints the results, and fails where half precision falls behind.

    Args:
      train: from the word, the number of steps and the seed to a result; more is better.
      description: of the example.
      steps: of each run, unless the command line says otherwise.
      tolerance: how far behind float32 a result may be.
      argv: the command line; that of the process by default.
    """
    options = Arguments(description, steps).parse_args(argv)
    results = {word: train(word, options.steps, options.seed) for word in ("no", "bf16", "fp16")}
    if not options.quiet:
        print(description)
    for word, result in results.items():
        print(f'precision="{word}": {result:.4f}')
    behind = [word for word, result in results.items() if not result >= results["no"] - tolerance]  # NaN, too
    return finish(f"{' and '.join(behind)} more than {tolerance} behind float32" if behind else None)
