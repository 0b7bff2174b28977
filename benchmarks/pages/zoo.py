"""The page of real models: what `zoo_*`, `stack_depth` and `accuracy` found, as Markdown."""

import textwrap
from typing import Any

from benchmarks.models import MODELS
from benchmarks.pages.markdown import crossed, grouped, launched, paragraph, provenance, section
from benchmarks.table import load
from benchmarks.times.peers import COUNTED_BY_ZOO_GPU

_GPU = {
    "by hand": "by hand, no scaling",
    "by hand, scaled": "by hand, scaling by hand",
    "wrapped": "wrapped, no scaling",
    "wrapped, `loss_scaled`": "wrapped, loss_scaled",
}


def models() -> str:
    parts = [
        "## On GPUs, compiled",
        *(gpu(), _figure("zoo_steps", "Bytes a step moves, and what loss scaling adds")),
        loss_scaling(),
        *(cards(), _figure("zoo_cards", "Estimated speed-ups of float16 on three cards")),
        "## On TPUs, compiled",
        tpus(),
        "## On a CPU",
        cpu(),
        "## Beside other libraries",
        peers(),
        torch(),
        "## Accuracy",
        *(accuracy(), _figure("accuracy", "Differences from float32 with their intervals")),
    ]
    return "\n\n".join(parts)


def _figure(name: str, words: str) -> str:
    return f"![{words}](images/{name}.svg)"


def gpu() -> str:
    """Steps in float16 on an H100, in four ways."""
    result = load("zoo_gpu")
    found = grouped(map(launched, result["rows"]), "model", "variant")
    lines = [section("four ways", card=result["target"].partition(",")[0]), ""]
    lines += crossed("Kernels launched", _GPU, found, "{launches}")
    lines += crossed("GB moved", _GPU, found, "{gigabytes:.2f}")
    lines += crossed("Temporary memory, GB", _GPU, found, "{temp_gigabytes:.2f}")
    rows = []
    for by in found.values():
        ms = by["wrapped, loss_scaled"]["estimated_ms"]
        over = {base: ms[base] / ms["float16"] for base in ("float32", "tf32")}
        rows.append({**by["wrapped, loss_scaled"], **over})
    return "\n".join([*lines, section("estimates", rows)])


def loss_scaling(result: dict[str, Any] | None = None) -> str:
    """What loss scaling adds on three cards; cells of what was not compiled are dashes."""
    result, rows = result or load("loss_scaling_zoo"), []
    for row in result["rows"]:
        added = {"model": row["model"], "card": row["card"]}
        for what in ("launches", "gigabytes"):
            numbers = dict(zip(row["variants"], row[what], strict=True))
            added[what] = numbers["loss_scaled"] / numbers["no scaling"] - 1
        rows.append(added)
    cards, found = {card: card for card in result["cards"]}, grouped(rows, "model", "card")
    lines = [section("loss scaling", result=result), ""]
    lines += crossed("Kernels launched, added by loss scaling", cards, found, "{launches:+.1%}")
    lines += crossed("GB moved, added by loss scaling", cards, found, "{gigabytes:+.1%}")
    return "\n".join(lines[:-1])


#: What a table of cards is of -> precision and number.
_CARDS = {
    "Estimated speed-up of float16 with loss scaling over float32": ("float16", "{over_float32:.2f}"),
    "Estimated speed-up of float16 with loss scaling over TF32": ("float16", "{over_tf32:.2f}"),
    "Estimated speed-up of bfloat16 over float32": ("bfloat16", "{over_float32:.2f}"),
    "Estimated speed-up of bfloat16 over TF32": ("bfloat16", "{over_tf32:.2f}"),
    "Share of float16's FLOPs on Tensor Cores": ("float16", "{tensor_core_share:.1%}"),
    "Temporary memory in float16, GB": ("float16", "{temp_gigabytes:.1f}"),
    "Temporary memory in float32, GB": ("float32", "{temp_gigabytes:.1f}"),
}


def cards(result: dict[str, Any] | None = None) -> str:
    """The tables of three cards, and below them what did not compile."""
    result = result or load("zoo_cards")
    names = result["cards"]
    found = grouped(result["rows"], "model", lambda row: (row["card"], row["precision"]))
    all_cards = f"{', '.join(names[:-1])} and {names[-1]}"
    lines = [section("cards", result=result, all_cards=all_cards), ""]
    for title, (precision, template) in _CARDS.items():
        lines += crossed(title, {card: (card, precision) for card in names}, found, template)
    for row in result["rows"]:
        if "error" in row:
            text = row["error"].replace("`", "'")
            lines.append(
                f"- {row['model']} in {row['precision']} does not compile for {row['card']}: `{text}`"
            )
    return "\n".join(lines).rstrip("\n")


def tpus(result: dict[str, Any] | None = None) -> str:
    """The tables of each TPU, and below them the models that were not compiled, or do not compile."""
    result = result or load("zoo_tpu")
    lines = [section("tpus", result=result), ""]
    variants = {v: v for v in ("float32", "by hand", "wrapped", "autocast")}
    for target in dict.fromkeys(row["target"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["target"] == target]
        for row in rows:
            products = row.get("products", {})
            row["half"], row["all"] = products.get("bfloat16", 0), sum(products.values())
        found = grouped(rows, "model", "variant")
        lines += crossed(f"GB moved, {target}", variants, found, "{gigabytes:.1f}")
        lines += crossed(f"Peak memory, GB, {target}", variants, found, "{peak_gigabytes:.1f}")
        lines += crossed(f"Products of two bfloat16 operands, {target}", variants, found, "{half} of {all}")
        missing = [model for model in MODELS if model not in found]
        if missing:
            lines += paragraph(f"Not compiled for {target} so far: {', '.join(missing)}.")
        failed: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            if "error" in row:
                # What follows are addresses in memory.
                error = textwrap.shorten(row["error"].replace("`", "'"), 160, placeholder=" ...")
                failed.setdefault((row["model"], error), []).append(row["variant"])
        for (model, error), names in failed.items():
            lines += paragraph(f"{model} ({', '.join(names)}) does not compile for {target}: `{error}`.")
    return "\n".join(lines).rstrip("\n")


def cpu() -> str:
    """Smaller models on a CPU: against by hand, and bfloat16 against float32."""
    rows = load("zoo_cost")["rows"]
    ours = [row for row in rows if row["comparison"].startswith("wrapped")]
    by_model = grouped(rows, "model", lambda row: row["comparison"].partition(" / ")[0])
    half = [by | {"name": model} for model, by in by_model.items()]
    return "\n\n".join([section("cpu", ours), _depths(), section("cpu bfloat16", half)])


def _depths() -> str:
    rows, found = load("stack_depth")["rows"], []
    for model in dict.fromkeys(row["model"] for row in rows):
        hand, ours = (
            [row["seconds"] for row in rows if (row["model"], row["variant"]) == (model, variant)]
            for variant in ("by hand, scaling by hand", "wrapped, loss_scaled")
        )
        swing, mean = max(hand) / min(hand), sum(ours) / sum(hand)
        found.append(
            f"{swing:.2f} of the quickest for {model}, and all wrapped ones {mean:.2f} of those by hand"
        )
    return section("depths", found="; ".join(found))


def accuracy() -> str:
    """What training comes to, task by task."""
    result = load("accuracy")
    shown = {row["task"]: row["measure"] for row in reversed(result["rows"])}
    compared = [row for row in result["rows"] if row["measure"] == shown[row["task"]]]
    rows = [by["float32"] | by for by in grouped(compared, "task", "precision").values()]
    return section("accuracy", rows, count=len(result["seeds"]))


LIBRARIES = ("by hand", "jmp_policy", "jmp", "mpx", "flax DynamicScale")
_TITLES = {name.replace("flax DynamicScale", "`DynamicScale`"): name for name in LIBRARIES}
#: What a table is of -> its number.
_TABLES = {
    "Kernels launched": "{launches}",
    "GB moved": "{gigabytes:.2f}",
    "Temporary memory, GB": "{temp_gigabytes:.2f}",
    "Share of FLOPs with both operands in half precision": "{half_share:.0%}",
}


def peers(result: dict[str, Any] | None = None, ours: dict[str, Any] | None = None) -> str:
    """The tables of the real models with each library, and what Keras's loss scaling adds.

    Args:
      result: of `zoo_peers`; loaded when it is not given.
      ours: of `zoo_gpu`, for the counts by hand and here.
    """
    result, ours = result or load("zoo_peers"), ours or load("zoo_gpu")
    parts = [_compiled(result, ours), _timed(result), _keras(result, ours)]
    return "\n\n".join("\n".join(part).rstrip() for part in parts if part)


def torch(result: dict[str, Any] | None = None) -> str:
    """PyTorch's own mixed precision: one row per device, size, model and variant."""
    result = result or load("zoo_torch")
    untold = dict.fromkeys(("temp_gigabytes", "peak_gigabytes"))
    rows = [row if row["peak_gigabytes"] else {**row, **untold} for row in result["rows"]]
    return section("torch", rows, result)


def _by_model(result: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    rows = (launched(row) for row in result["rows"] if row["where"] == where)
    return grouped(rows, "model", "library")


def _compiled(result: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    found, counted = _by_model(result, "H100"), grouped(map(launched, ours["rows"]), "model", "variant")
    if not found:
        return []
    for model, by in found.items():
        for library, variant in COUNTED_BY_ZOO_GPU.items():
            by[library] = counted[model][variant] | by[library]
    lines = [
        section(
            "libraries",
            result=result,
            card=result["target"].partition(",")[0],
            all_peers=", ".join(f"{name} {version}" for name, version in result["peers"].items()),
            our_provenance=provenance(ours),
        ),
        "",
    ]
    for title, template in _TABLES.items():
        lines += crossed(title, _TITLES, found, template, failed="")
    return [*lines, *_failures(found)]


def _timed(result: dict[str, Any]) -> list[str]:
    found = _by_model(result, "CPU")
    if not found:
        return []
    rows = [by[library] for by in found.values() for library in LIBRARIES[1:] if "error" not in by[library]]
    return [section("libraries on a CPU", rows, result), "", *_failures(found)]


def _keras(result: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    (by,) = _by_model(result, "H100, Keras").values() or ({},)
    if not by:
        return []
    plain, scaled = (by[name] for name in ("keras, no scaling", "keras LossScaleOptimizer"))
    name = plain["model"]
    rows = {row["variant"]: row for row in ours["rows"] if row["model"] == name}
    before, after = rows["wrapped, no scaling"], rows["wrapped, loss_scaled"]
    theirs, ours = _added(plain, scaled), _added(before, after)
    return [section("keras", result=result, model=name, theirs=theirs, ours=ours)]


def _added(before: dict[str, Any], after: dict[str, Any]) -> str:
    kernels, temp = (after[key] - before[key] for key in ("kernels", "temp_gigabytes"))
    share = kernels / before["kernels"]
    return (
        f"{kernels:+d} kernels ({share:+.1%}), {after['gigabytes'] - before['gigabytes']:+.2f} GB moved "
        f"({after['added_bytes']}) and {temp:+.2f} GB of temporary memory"
    )


def _failures(found: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each library that failed on a model."""
    errors = [
        f"{library} fails on {model}: `{row['error']}`."
        for model, by in found.items()
        for library, row in by.items()
        if "error" in row
    ]
    return [line for error in errors for line in paragraph(error)]
