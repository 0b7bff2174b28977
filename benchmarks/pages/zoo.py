"""The pages of real models: what `zoo_*` and `accuracy` found, as Markdown."""

import textwrap
from typing import Any

from benchmarks.counts.zoo_gpu import JAX
from benchmarks.pages.markdown import crossed, folded, grouped, paragraph, provenance, section, under
from benchmarks.table import load
from benchmarks.times.peers import COUNTED_BY_ZOO_GPU


def performance() -> str:
    """The page that most read: one table for each question."""
    parts = [
        "## On GPUs",
        *(speedups(), _figure("zoo_cards", "Estimated speed-ups of float16 on three cards")),
        "## By the clock",
        by_the_clock(),
        "## Beside other libraries",
        *(moved(), _figure("zoo_steps", "What loss scaling adds to a step")),
        "## On a CPU",
        cpu(),
        "## Accuracy",
        accuracy(),
    ]
    return "\n\n".join(parts)


def results() -> str:
    """All other tables, folded."""
    parts = [
        *("## GPUs", cards(), section("each by the clock"), loss_scaling()),
        *("## TPUs", tpus()),
        *("## CPUs", folded_bfloat16()),
        *("## Other libraries", peers(), torch()),
    ]
    return "\n\n".join(parts)


def by_the_clock() -> str:
    """Steps that a GPU has run, a column per model; what loss scaling adds to the time in their kernels."""
    result = load("zoo_device")
    ran = [row for row in result["rows"] if "error" not in row]
    models, half = grouped(ran, "model", "variant"), [row for row in ran if "float32" not in row["variant"]]
    ratios = [row["estimated_ms"] / row["measured_ms"] for row in half]
    added = (
        f"{by['float16']['kernel_ms'] / by['float16, no scaling']['kernel_ms'] - 1:.1%} in {model}"
        for model, by in models.items()
    )
    found = {"added": ", ".join(added), "least": min(ratios), "most": max(ratios)}
    columns, cell = {model: model for model in models}, "{measured_ms:.1f} ({over_tf32:.2f})"
    table = crossed(columns, grouped(ran, "variant", "model"), cell)
    return "\n".join([section("clock", result=result, **found), "", *table])


def _figure(name: str, words: str) -> str:
    return f"![{words}](images/{name}.svg)"


def speedups() -> str:
    """Float16 over what JAX does with float32 by default: TF32, where a card has it."""
    result = load("zoo_cards")
    shown = {
        "V100, over float32": ("V100", "over_float32"),
        "A100, over TF32": ("A100", "over_tf32"),
        "H100, over TF32": ("H100", "over_tf32"),
    }
    half = [row for row in result["rows"] if row["precision"] == "float16"]
    found = {
        model: {(card, over): {"found": by[card][over]} for card, over in shown.values()}
        for model, by in grouped(half, "model", "card").items()
    }
    least = min(row["tensor_core_share"] for row in half)
    words = section("cards", result=result, least=least)
    return "\n".join([words, "", *crossed(shown, found, "{found:.2f}")])


def loss_scaling() -> str:
    """What loss scaling adds to a step, by hand and here, under both versions of JAX."""
    result = load("zoo_gpu")
    found = grouped(result["rows"], "model", lambda row: (row["jax"], row["variant"]))
    variants = {"by hand": "by hand, scaling by hand", "here": "wrapped, loss_scaled"}
    columns = {f"{how}, jax {jax}": (jax, variants[how]) for jax in JAX for how in variants}
    tables = {"Launches added": "{added_launches}", "Bytes added": "{added_bytes}"}
    shown = (folded(title, crossed(columns, found, template)) for title, template in tables.items())
    return "\n\n".join([section("loss scaling", result=result), *shown])


#: What a table of cards is of -> precision and number.
_CARDS = {
    "Speed-up of float16 over float32": ("float16", "{over_float32:.2f}"),
    "Speed-up of bfloat16 over TF32": ("bfloat16", "{over_tf32:.2f}"),
    "Temporary memory in float16, GB": ("float16", "{temp_gigabytes:.1f}"),
    "Temporary memory in float32, GB": ("float32", "{temp_gigabytes:.1f}"),
}


def cards(result: dict[str, Any] | None = None) -> str:
    """The tables of three cards, and below them what did not compile."""
    result = result or load("zoo_cards")
    names = result["cards"]
    found = grouped(result["rows"], "model", lambda row: (row["card"], row["precision"]))
    parts = [section("more cards", result=result)]
    for title, (precision, template) in _CARDS.items():
        columns = {card: (card, precision) for card in names}
        parts.append(folded(title, crossed(columns, found, template)))
    for row in result["rows"]:
        if "error" in row:
            text = row["error"].replace("`", "'")
            parts.append(
                f"- {row['model']} in {row['precision']} does not compile for {row['card']}: `{text}`"
            )
    return "\n\n".join(parts)


def tpus(result: dict[str, Any] | None = None) -> str:
    """The tables of each TPU, and below them the models that do not compile."""
    result = result or load("zoo_tpu")
    parts = [section("tpus", result=result)]
    variants = {v: v for v in ("float32", "by hand", "wrapped", "autocast")}
    for target in dict.fromkeys(row["target"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["target"] == target]
        found = grouped(rows, "model", "variant")
        for title, template in (("GB moved", "{gigabytes:.1f}"), ("Peak memory, GB", "{peak_gigabytes:.1f}")):
            parts.append(folded(f"{title}, {target}", crossed(variants, found, template)))
        failed: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            if "error" in row:
                # What follows are addresses in memory.
                error = textwrap.shorten(row["error"].replace("`", "'"), 80, placeholder=" ...")
                failed.setdefault((row["model"], error), []).append(row["variant"])
        for (model, error), names in failed.items():
            words = f"{model} ({', '.join(names)}) does not compile for {target}: `{error}`."
            parts.append("\n".join(paragraph(words)))
    return "\n\n".join(part.rstrip("\n") for part in parts)


def cpu() -> str:
    """Smaller models on a CPU, against by hand."""
    rows = load("zoo_cost")["rows"]
    return section("cpu", [row for row in rows if row["comparison"].startswith("wrapped")])


def folded_bfloat16() -> str:
    """The same models in bfloat16, against float32."""
    rows = load("zoo_cost")["rows"]
    by_model = grouped(rows, "model", lambda row: row["comparison"].partition(" / ")[0])
    half = [by | {"name": model} for model, by in by_model.items()]
    return section("cpu bfloat16", half)


def accuracy() -> str:
    """What training comes to, task by task; an interval is as wide on either side of the difference."""
    result = load("accuracy")
    shown = {row["task"]: row["measure"] for row in reversed(result["rows"])}
    compared = [row for row in result["rows"] if row["measure"] == shown[row["task"]]]
    for row in compared:
        if "interval" in row:
            low, high = row["interval"]
            row["half"] = (high - low) / 2
    rows = [by["float32"] | by for by in grouped(compared, "task", "precision").values()]
    return section("accuracy", rows, count=len(result["seeds"]))


LIBRARIES = ("by hand", "jmp_policy", "jmp", "mpx", "flax DynamicScale")
_TITLES = {name.replace("flax DynamicScale", "`DynamicScale`"): name for name in LIBRARIES}
#: What a table is of -> its number.
_TABLES = {
    "Kernels launched": "{launches}",
    "Temporary memory, GB": "{temp_gigabytes:.2f}",
    "Share of FLOPs with both operands in half precision": "{half_share:.0%}",
}


def moved() -> str:
    """Bytes that a step moves, with each library."""
    result, ours = load("zoo_peers"), under("0.10", load("zoo_gpu"))
    found = _counted(result, ours)
    card = result["target"].partition(",")[0]
    words = section("moved", result=result, card=card, our_provenance=provenance(ours))
    return "\n".join([words, "", *crossed(_TITLES, found, "{gigabytes:.1f}", failed="")])


def peers(result: dict[str, Any] | None = None, ours: dict[str, Any] | None = None) -> str:
    """The tables of the real models with each library, and what Keras's loss scaling adds.

    Args:
      result: of `zoo_peers`; loaded when it is not given.
      ours: of `zoo_gpu`, for the counts by hand and here.
    """
    result, ours = result or load("zoo_peers"), ours or under("0.10", load("zoo_gpu"))
    parts = [*_compiled(result, ours), *_timed(result), *_keras(result, ours)]
    return "\n\n".join(parts)


def torch(result: dict[str, Any] | None = None) -> str:
    """PyTorch's own mixed precision: one row per device, size, model and variant."""
    result = result or load("zoo_torch")
    return section("torch", result["rows"], result)


def _by_model(result: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    return grouped([row for row in result["rows"] if row["where"] == where], "model", "library")


def _counted(result: dict[str, Any], ours: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Compiled steps by model and library; `zoo_gpu` has those by hand and with this library."""
    found, counted = _by_model(result, "H100"), grouped(ours["rows"], "model", "variant")
    for model, by in found.items():
        for library, variant in COUNTED_BY_ZOO_GPU.items():
            by[library] = counted[model][variant] | by[library]
    return found


def _compiled(result: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    found = _counted(result, ours)
    if not found:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in result["peers"].items())
    parts = [section("libraries", result=result, all_peers=versions)]
    for title, template in _TABLES.items():
        parts.append(folded(title, crossed(_TITLES, found, template, failed="")))
    return [*parts, *_failures(found)]


def _timed(result: dict[str, Any]) -> list[str]:
    found = _by_model(result, "CPU")
    if not found:
        return []
    rows = [by[library] for by in found.values() for library in LIBRARIES[1:] if "error" not in by[library]]
    return [section("libraries on a CPU", rows, result), *_failures(found)]


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
    return ["\n".join(paragraph(error)).rstrip("\n") for error in errors]
