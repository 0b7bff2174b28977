"""Writes the measured numbers into docs, between their two markers, from results/*.json.

`python -m benchmarks pages` rewrites, and a test compares: no page can drift from what was measured. The
words are in `sections.md`; here is what is not in a result as it stands.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.counts.float8 import estimated
from benchmarks.pages import autocast_lists
from benchmarks.pages.markdown import grouped, section
from benchmarks.pages.zoo import models
from benchmarks.table import load

ROOT = pathlib.Path(__file__).parents[2]
BEGIN, END = "<!-- measured: written by benchmarks/pages -->", "<!-- end -->"


def overhead() -> str:
    rows = [row for row in load("overhead")["rows"] if row["comparison"] == "library / by hand"]
    return section("overhead", rows)


def gpu() -> str:
    result = load("loss_scaling_cost")
    shown = ("by hand, no scaling", "by hand, scaling by hand", "wrapped, no scaling", "wrapped, loss_scaled")
    rows = [row for name in shown for row in result["rows"] if row["variant"] == name]
    return section("gpu", rows, card=result["target"].split(",")[0])


def nnx() -> str:
    result = load("nnx_cost")
    wrap = next(row for row in result["wrapping"] if row["what"] == "wrap")
    calls = {row["variant"]: row["ratio"] for row in result["calls"]}
    first: dict[tuple[str, str], dict[str, Any]] = {}  # The first way of writing it by hand.
    for row in result["rows"]:
        first.setdefault((row["model"], row["dtype"]), row)
    return "## NNX\n\n" + section("nnx", first.values(), wrap=wrap, **calls)


def autocast() -> str:
    result = load("autocast_cost")
    by_model = grouped(result["rows"], "model", lambda row: (row["dtype"], row["comparison"]))
    cases = [
        {"model": model, "dtype": dtype}
        | {base: by[dtype, f"autocast / {base}"] for base in ("float32", "by hand")}
        for model, by in by_model.items()
        for dtype in ("float16", "bfloat16")
    ]
    call = next(row["ratio"] for row in result["calls"] if row["call"] == "jit(autocast(f))(x)")
    return section("autocast", cases, call=call)


def reports() -> str:
    return section("reports", [row for row in load("report_cost")["rows"] if row["looks at"] != "nothing"])


def float32_gradients() -> str:
    gpu = load("grad_dtype_gpu_cost")
    before, after = gpu["rows"]
    return section("float32 gradients", before=before, after=after, layers=gpu["layers"])


def collectives() -> str:
    def megabytes(row: dict[str, Any]) -> dict[str, Any]:
        return {name: x if isinstance(x, str) else x / 1e6 for name, x in row.items()}

    return section("collectives", map(megabytes, load("grad_dtype_collectives")["rows"]))


def communication() -> str:
    return section("communication", [row for row in load("communication")["rows"] if row["devices"] == 8])


def drift_cost() -> str:
    found = grouped(load("drift_cost")["rows"], "model", "program")
    return section("drift cost", [by | {"name": name} for name, by in found.items()])


def ranking() -> str:
    result = load("sensitivity")
    ratios = {
        model: float(np.median([m["measured"] / m["predicted"] for m in found if m["predicted"]]))
        for model, found in result["measured"].items()
    }
    return section("ranking", [{**row, "ratio": ratios[row["model"]]} for row in result["rows"]])


def recommended() -> str:
    rows = [{**row, "rule_count": len(row["rules"])} for row in load("recommend_zoo")["rows"]]
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
    rows = load("fp8_gpu")["rows"]
    rows = [{**row, "products": row["float8_products"] + row["other_products"]} for row in rows]
    return section("float8 steps", rows)


def float8_choices() -> str:
    rows = []
    for row in load("fp8_profit")["rows"]:
        profits = estimated(row)
        estimate = round(sum(profit.saved - profit.added for profit in profits) * 1e6)
        is_chosen = "yes" if all(profit.gains for profit in profits) else "no"
        gain = row["saved_us"] - row["added_us"]
        rows.append(row | {"gain": gain, "estimate": estimate, "chosen": is_chosen})
    wrong = sum(row["chosen"] == "yes" and row["gain"] < 0 for row in rows)
    return section("float8 choices", rows, wrong=wrong or "none")


#: Values of Student's t that chance exceeds, on either side, once in a hundred times, by number of pairs.
_T_LIMIT = {5: 4.604}


def float8_losses() -> str:
    result = load("fp8_training")
    losses = {(row["task"], row["policy"]): np.array(row["losses"]) for row in result["rows"]}
    rows, beyond = [], []
    for (task, policy), found in losses.items():
        row = {"task": task, "policy": policy, "loss": found.mean()}
        over = {base: found - losses[task, base] for base in ("float32", "bfloat16")}
        for base in ("float32", "bfloat16") if policy not in over else ("float32",):
            if base != policy:
                row |= {base: over[base].mean(), f"{base} deviation": over[base].std(ddof=1)}
        if policy not in over and abs(_t_value(over["bfloat16"])) > _T_LIMIT[result["seeds"]]:
            beyond.append(f"`{policy}` on {task} ({over['bfloat16'].mean():+.4f})")
        rows.append(row)
    return section("float8 losses", rows, beyond=", ".join(beyond) or "none")


def _t_value(pairs: np.ndarray) -> float:
    """Mean over its standard error; 0 where all are equal to 0."""
    error = pairs.std(ddof=1) / np.sqrt(len(pairs))
    return float(pairs.mean() / error) if error else 0.0


def float8_gradients() -> str:
    rows = load("fp8_training")["gradients"]
    none = "; ".join(row["model"] for row in rows if not row["float8_share"])
    return section("float8 gradients", [row for row in rows if row["float8_share"]], none=none)


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
    "docs/autocast.md": (
        (autocast_lists.table,),
        (autocast, "encoder under autocast", "models under autocast"),
    ),
    "docs/drift.md": (("drift shares",), (drift_cost,)),
    "docs/float8.md": (
        (float8_steps,),
        ("float8 blocks",),
        (float8_choices,),
        (float8_losses, float8_gradients),
    ),
    "docs/index.md": ((gains,),),
    "docs/performance.md": ((models, nnx),),
    "docs/recommend.md": ((ranking, recommended),),
    "docs/reliability.md": (("faults",), (agents,), ("checkpoints",)),
    "docs/reports.md": ((reports,),),
    "docs/results/costs.md": (
        (overhead, gpu),
        (float32_gradients, collectives, communication, "accumulation"),
        ("rounding",),
    ),
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
