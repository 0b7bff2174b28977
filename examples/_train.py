"""The loop that the trainings share: options, config files, checkpoints, resuming, logs and the picture.

A training is a state (a pytree of arrays) and a function `(state, number of the step) -> (state, metrics)`.
Since batches depend on nothing but the number of the step, a run that was stopped goes on as if it had not
been: bit for bit.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from _run import Arguments, progress_bar
from rich.console import Console

import jmp_policy as jmpp

State = Any
Step = Callable[[State, int], tuple[State, Mapping[str, Any]]]


def parse(
    description: str, defaults: Mapping[str, Any], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Reads the options of a training; the command line wins over the file `--config`.

    Args:
      description: what the example does.
      defaults: settings and their values; an option of the same name is of the same type. "precision" is
        anything that `jmp_policy.from_config` reads.
      argv: the command line; that of the process by default.
    """
    parser = Arguments(description, defaults["steps"])
    parser.add_argument("--config", type=pathlib.Path, help="a YAML or JSON file with any of these settings")
    parser.add_argument("--precision", help=f"fp16, bf16, no, ... (default: {defaults['precision']})")
    parser.add_argument("--out", type=pathlib.Path, help="a folder for checkpoints, log and picture")
    parser.add_argument("--fresh", action="store_true", help="begin again, though there is a checkpoint")
    for name, value in defaults.items():
        if name not in ("precision", "out", "steps", "seed"):
            parser.add_argument(f"--{name}", type=type(value), help=f"(default: {value})")
    try:
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config", type=pathlib.Path)
        parser.set_defaults(**{**defaults, **_config(first.parse_known_args(argv)[0].config, defaults)})
        options = parser.parse_args(argv)
        options.precision = jmpp.from_config(options.precision)
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    options.out = pathlib.Path(options.out)
    return options


def _config(path: pathlib.Path | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text()) if path else {}  # JSON is YAML.
    if not isinstance(found, dict) or (unknown := sorted(set(found) - set(defaults))):
        what = f"the unknown settings {unknown}" if isinstance(found, dict) else "no mapping"
        raise ValueError(f"{path} has {what}; known settings: {sorted(defaults)}")
    for name, value in found.items():
        kinds = (int, float) if isinstance(defaults[name], float) else (type(defaults[name]),)
        if name != "precision" and not isinstance(value, kinds):
            raise TypeError(f"{path}: {name} must be of type {kinds[-1].__name__}, got {value!r}")
    return found


def train(options: argparse.Namespace, state: State, step: Step, *, name: str, log: Any = None) -> State:
    """Trains up to `options.steps`, from the last checkpoint in `options.out` if there is one.

    Args:
      options: of `parse`.
      state: the state at step 0. A checkpoint is restored into its shapes, dtypes and shardings.
      step: one step.
      name: of the run, for the progress bar.
      log: an object with `add_scalar(name, value, step)`, such as a TensorBoard `SummaryWriter`.

    Returns:
      The state after the last step. `history(options)` reads what was logged.
    """
    console = Console(highlight=False)
    every = max(options.steps // 5, 1)
    with ocp.CheckpointManager(options.out.absolute() / "checkpoints") as manager:
        if options.fresh:
            for number in manager.all_steps():
                manager.delete(number)
        first = manager.latest_step() or 0
        if first:
            template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(first, args=ocp.args.StandardRestore(template))
            if not options.quiet:
                console.print(f"{name}: going on after step {first} of {options.out}")
        lines = _log_lines(options)[:first]
        with progress_bar(console, options.quiet) as progress, _log_file(options).open("w") as file:
            file.writelines(lines)
            for number in progress.track(range(first, options.steps), description=name):
                state, metrics = step(state, number)
                scalars = {key: float(value) for key, value in jax.device_get(dict(metrics)).items()}
                file.write(json.dumps({"step": number, **scalars}) + "\n")
                for key, value in scalars.items() if log else ():
                    log.add_scalar(key, value, number)
                if (number + 1) % every == 0 or number + 1 == options.steps:
                    file.flush()  # A line of the log for each step of the checkpoint.
                    manager.save(number + 1, args=ocp.args.StandardSave(state))
    return state


def history(options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Returns what was logged: for each metric an array with one value per step."""
    rows = [json.loads(line) for line in _log_lines(options)]
    return {key: np.array([row[key] for row in rows]) for key in rows[0]} if rows else {}


def _log_file(options: argparse.Namespace) -> pathlib.Path:
    options.out.mkdir(parents=True, exist_ok=True)
    return options.out / "log.jsonl"


def _log_lines(options: argparse.Namespace) -> list[str]:
    path = _log_file(options)
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def plot(options: argparse.Namespace, title: str, more: Callable[[Any], None] | None = None) -> pathlib.Path:
    """Draws the loss, and the loss scale with its skipped steps; returns the file.

    Args:
      options: of `parse`.
      title: of the picture.
      more: draws into a third panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = history(options)
    figure, axes = plt.subplots(3 if more else 2, 1, figsize=(5, 7.5 if more else 5), layout="constrained")
    axes[0].plot(found["step"], found["loss"], color="#0072B2", linewidth=1)
    axes[0].set(title=title, ylabel="loss", yscale="log" if found["loss"].min() > 0 else "linear")
    axes[1].plot(found["step"], np.log2(found["loss_scale"]), color="#D55E00")
    skipped = np.flatnonzero(np.diff(found["skipped_steps"], prepend=0))
    axes[1].plot(found["step"][skipped], np.log2(found["loss_scale"][skipped]), "kx", label="skipped step")
    axes[1].set(xlabel="step", ylabel="log2 of the loss scale")
    if len(skipped):
        axes[1].legend(frameon=False)
    if more:
        more(axes[2])
    path = options.out / "plot.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def judged(options: argparse.Namespace, least_fall: float) -> str | None:
    """Says why a training failed, or None: the loss must fall, and few steps may be skipped."""
    found = history(options)
    tenth = max(len(found["loss"]) // 10, 1)
    begin, end = (float(np.mean(part)) for part in (found["loss"][:tenth], found["loss"][-tenth:]))
    if not math.isfinite(end) or end > least_fall * begin:
        return f"the loss went from {begin:.3f} to {end:.3f}; less than {least_fall:g} of it was expected"
    if found["skipped_steps"][-1] > max(len(found["loss"]) // 5, 20):
        return f"{found['skipped_steps'][-1]:g} of {len(found['loss'])} steps were skipped"
    return None
