"""Writes the measured numbers into docs, between their two markers, from results/*.json.

`python -m benchmarks pages` rewrites, and a test compares: no page can drift from what was measured. The
words are in `sections.md`; here is what is not in a result as it stands.
"""

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.counts.float8 import estimated
from benchmarks.pages import autocast_lists, zoo
from benchmarks.pages.markdown import grouped, provenance, section, under
from benchmarks.table import load

ROOT = pathlib.Path(__file__).parents[2]
BEGIN, END = "<!-- measured: written by benchmarks/pages -->", "<!-- end -->"


def gpu() -> str:
    result = load("loss_scaling_cost")
    shown = ("by hand, no scaling", "by hand, scaling by hand", "wrapped, no scaling", "wrapped, loss_scaled")
    rows = [row for name in shown for row in result["rows"] if row["variant"] == name]
    return section("gpu", rows, card=result["target"].split(",")[0])


def nnx() -> str:
    wrap, call = load("nnx_calls")["rows"]
    return "## NNX\n\n" + section("nnx", wrap=wrap, call=call["ratio"])


def autocast() -> str:
    counted = under("0.10", load("zoo_gpu"))
    measured = load("gradient_errors")
    errors = {row["model"]: row for row in measured["rows"]}
    steps = [
        {
            "model": model,
            "hand": by["by hand, no scaling"],
            "auto": by["autocast"],
            "error": _percent(errors[model]),
        }
        for model, by in grouped(counted["rows"], "model", "variant").items()
        if model in errors
    ]
    models = section("models under autocast", steps, counted, errors=provenance(measured))
    return "\n\n".join(["## autocast", section("autocast"), models])


def _percent(row: dict[str, Any]) -> dict[str, Any]:
    return {name: x if isinstance(x, str) else 100 * x for name, x in row.items()}


def reports() -> str:
    rows = [row for row in load("report_cost")["rows"] if row["looks at"] != "nothing"]
    return section("reports", rows)


def float32_gradients() -> str:
    gpu = load("grad_dtype_gpu_cost")
    before, after = gpu["rows"]
    return section("float32 gradients", before=before, after=after, layers=gpu["layers"])


def planted_faults() -> str:
    """A row per fault; after the place and the operation what is wrong of it."""
    rows = load("planted_faults")["rows"]
    keys = ("place", "cause", "mended", "nnx_place", "nnx_cause", "nnx_mended")
    known = {key: [row[key] for row in rows if key in row] for key in keys}
    counts: dict[str, Any] = {key: f"{sum(values)} of {len(values)}" for key, values in known.items()}
    shown = [
        row
        | {"wrong": " (wrong place and cause)" * (not row["place"]) or " (wrong cause)" * (not row["cause"])}
        | {
            key: "—" if key not in row else row[key] if row[key] == row[key] else "nothing advised"
            for key in ("after", "nnx_after")
        }
        for row in rows
    ]
    return section("planted faults", shown, tried=len(rows), **counts)


def healthy_models() -> str:
    rows = load("healthy_models")["rows"]
    complaining = [row | {"what": _what_is_said(row["said"])} for row in rows if row["complaints"]]
    return section("healthy models", complaining, tried=len(rows), complaining=len(complaining))


def _what_is_said(said: str) -> str:
    """Complaints without the report's name and the place: "scatter-add, 2 times"."""
    kinds = Counter(text.removeprefix("audit: ").partition(" in ")[0] for text in said.split("; "))
    return ", ".join(
        f"{kind}{f', {n} times' if n > 1 else ''}" for kind, n in kinds.items() if "drift" not in kind
    )


def drift_cost() -> str:
    found = grouped(load("drift_cost")["rows"], "model", "program")
    return section("drift cost", [by | {"name": name} for name, by in found.items()])


def recommended() -> str:
    """What `recommend` gives, and how `sensitivity` ranks the modules of the same models."""
    ranked = {row["model"]: row["spearman"] for row in load("sensitivity")["rows"]}
    rows = [
        {**row, "rule_count": len(row["rules"]), "spearman": ranked[row["model"]]}
        for row in load("recommend_zoo")["rows"]
    ]
    return section("recommended", rows, budget=rows[0]["budget"])


def gains() -> str:
    models = grouped(load("zoo_cards")["rows"], "model", lambda row: (row["card"], row["precision"]))
    rows = [
        {"model": model, **half, "share": half["temp_gigabytes"] / whole["temp_gigabytes"]}
        for model in ("ResNet-50", "BERT-Large", "GPT-2", "Transformer-XL", "WaveNet")
        for half, whole in [[models[model]["A100", precision] for precision in ("float16", "float32")]]
    ]
    return section("gains", rows)


def float8_steps() -> str:
    """A row per step; its time under each recipe and its memory, over those in bfloat16."""
    found = grouped(load("fp8_gpu")["rows"], "size", "policy")
    rows = [{"size": size, "of": by} for size, by in found.items()]
    for row in rows:
        row["saved"] = row["of"]["fp8_current"]["temp_gigabytes"] / row["of"]["bfloat16"]["temp_gigabytes"]
    ran = load("fp8_device")
    timed = "; ".join(
        f"`{row['policy']}`, {row['size']}: {row['of_bfloat16']['median']:.2f}"
        for row in ran["rows"]
        if row["policy"] != "bfloat16"
    )
    return section("float8 steps", rows, timed=f"Timed on one {ran['device']}: {timed} ({provenance(ran)}).")


def float8_blocks() -> str:
    rows = [row for row in load("fp8_blocks")["rows"] if row["recipe"] != "bfloat16"]
    return section("float8 blocks", rows)


def float8_attention() -> str:
    """A row per recipe, with its time for both lengths."""
    found = grouped(load("fp8_attention")["rows"], "recipe", "length")
    rows = [
        by["2048"] | {"short": by["2048"]["of_bfloat16"], "long": by["8192"]["of_bfloat16"]}
        for by in found.values()
    ]
    return section("float8 attention", rows)


def float8_choices() -> str:
    """How many layers `worthwhile` chooses, and how many of them lose."""
    rows, chosen, missed = load("fp8_profit")["rows"], [], []
    for row in rows:
        gains = all(profit.gains for profit in estimated(row))
        (chosen if gains else missed).append(row["saved_us"] - row["added_us"])
    counts = {"chosen": len(chosen), "tried": len(rows), "lose": sum(gain < 0 for gain in chosen) or "none"}
    return section("float8 choices", missed=sum(gain > 0 for gain in missed) or "none", **counts)


#: Values of Student's t that chance exceeds, on either side, once in a hundred times, by number of pairs.
_T_LIMIT = {5: 4.604}


def float8_losses() -> str:
    """A row per policy; for each task the mean difference from bfloat16, seed by seed."""
    result = load("fp8_training")
    losses = {(row["task"], row["policy"]): np.array(row["losses"]) for row in result["rows"]}
    shown: dict[str, dict[str, Any]] = {}
    beyond = []
    for (task, policy), found in losses.items():
        if policy in ("float32", "bfloat16"):
            continue
        over = found - losses[task, "bfloat16"]
        shown.setdefault(policy, {"policy": policy})[task] = {
            "mean": over.mean(),
            "deviation": over.std(ddof=1),
        }
        if abs(_t_value(over)) > _T_LIMIT[result["seeds"]]:
            beyond.append(f"`{policy}` on {task}")
    return section("float8 losses", shown.values(), beyond=", ".join(beyond) or "none")


def _t_value(pairs: np.ndarray) -> float:
    """Mean over its standard error; 0 where all are equal to 0."""
    error = pairs.std(ddof=1) / np.sqrt(len(pairs))
    return float(pairs.mean() / error) if error else 0.0


def float8_gradients() -> str:
    rows = [row for row in load("fp8_gradients")["rows"] if row["float8_share"]]
    return section("float8 gradients", rows)


def agents() -> str:
    rows, beyond = [], []
    for algorithm, found in grouped(load("rejax")["rows"], "algorithm", "precision").items():
        base = found["float32"]
        parts = len(base["means"])
        for i in (0, parts - 1):
            row = {**base, "steps": base["steps"] * (i + 1) // parts}
            for precision, of in found.items():
                mean, error = of["means"][i], of["standard_errors"][i]
                over = (mean - base["means"][i]) / np.hypot(error, base["standard_errors"][i])
                row[precision] = f"{mean:.0f} ± {error:.0f}" + (f" ({over:+.1f})" if of is not base else "")
                if i == parts - 1 and abs(over) > 2:
                    beyond.append(f"{algorithm} in {precision}")
            rows.append(row)
    sac = grouped(load("rejax")["rows"], "algorithm", "precision")["SAC"]
    plain, repaired = sac["float16"], sac["float16, actions in float32"]
    more = {"updates": plain["steps"] - load("rejax")["settings"]["SAC"]["fill_buffer"]}
    more |= {"skipped": plain["actor_skipped"], "repaired": repaired["actor_skipped"]}
    more |= {"worst": min(plain["values"]), "best": min(repaired["values"])}
    return section("agents", rows, beyond=", ".join(beyond) or "none", **more)


#: What writes a part of a page, or the name of a section whose result is shown as it stands.
Numbers = Callable[[], str] | str

#: Files with measured numbers between markers, and what writes them, a tuple for each pair of markers.
FILES: dict[str, tuple[tuple[Numbers, ...], ...]] = {
    "docs/drift.md": ((recommended,), (drift_cost,)),
    "docs/float8.md": (
        (float8_steps,),
        (float8_choices,),
        (float8_blocks,),
        (float8_attention,),
        (float8_losses, float8_gradients),
    ),
    "docs/index.md": ((gains,),),
    "docs/performance.md": ((zoo.performance,),),
    "docs/reliability.md": ((agents,),),
    "docs/reports.md": ((reports,), ("lines", planted_faults, healthy_models, "planted parts")),
    "docs/scaling_out.md": (("scaling out",),),
    "docs/results/autocast_lists.md": ((autocast_lists.table,),),
    "docs/results/costs.md": (
        ("overhead", gpu),
        (float32_gradients, "experts"),
        ("rounding",),
        ("first call",),
        ("drift shares",),
    ),
    "docs/results/models.md": ((zoo.results, nnx, autocast),),
}


def written(text: str, tables: tuple[tuple[Numbers, ...], ...]) -> str:
    """A file's text with what is between the markers replaced."""
    done = ""
    for parts in tables:
        before, _, rest = text.partition(BEGIN)
        _, _, text = rest.partition(END)
        numbers = "\n\n".join(section(part) if isinstance(part, str) else part() for part in parts)
        done += f"{before}{BEGIN}\n{numbers}\n{END}"
    return done + text


def main() -> None:
    for name, parts in FILES.items():
        path = ROOT / name
        path.write_text(written(path.read_text(), parts))
