"""Tables of docs/float8.md: steps, recipes with blocks, what `worthwhile` chooses, what training loses."""

from benchmarks._tables import load, paragraph, provenance, table
from benchmarks.fp8_profit import estimated


def steps() -> str:
    """What recipes make of a training step."""
    result = load("fp8_gpu")
    words = (
        "An AdamW step of a Transformer encoder, and of GPT-2 (768 wide, 12 layers, 8 x 1024 tokens), "
        f"compiled for an H100 ({provenance(result)}; no GPU). Kernels for scales compute nothing else. The "
        "roofline is a lower bound of the step's time, launches included, here as a share of bfloat16's:"
    )
    cells = (
        [row["size"], f"`{row['policy']}`", f"{row['float8_products']} of {total}", str(row["kernels"]),
         str(row["for_scales"]), f"{row['gigabytes']:.1f}", f"{row['temp_gigabytes']:.2f}",
         f"{row['of_bfloat16']:.3f}"]
        for row in result["rows"]
        for total in [row["float8_products"] + row["other_products"]]
    )  # fmt: skip
    header = " step | policy | float8 products | kernels | for scales | GB moved | temporary GB | roofline"
    return "\n".join([*paragraph(words), *table(header, cells)])


def blocks() -> str:
    """One product on cards with and without scales for blocks."""
    result = load("fp8_blocks")
    size = result["size"]
    words = (
        f"One product of {size} x {size} x {size} and its two gradients, on one device "
        f"({provenance(result)}; compiled only). Recipes with blocks are multiplied in float8 by a B200."
    )
    cells = (
        [row["target"], f"`{row['recipe']}`", row["arithmetic"], str(row["kernels"]),
         f"{row['gigabytes']:.2f}", f"{row['of_bfloat16']:.2f}"]
        for row in result["rows"]
    )  # fmt: skip
    header = " card | recipe | multiplied in | kernels | GB moved | roofline, of bfloat16"
    return "\n".join([*paragraph(words), *table(header, cells)])


def chosen() -> str:
    """What `worthwhile` chooses, beside what the compiler makes of the layers."""
    result = load("fp8_profit")
    estimates = [estimated(row) for row in result["rows"]]
    chosen = [all(profit.gains for profit in profits) for profits in estimates]
    gains = [row["saved_us"] - row["added_us"] for row in result["rows"]]
    wrong = sum(is_chosen and gain < 0 for is_chosen, gain in zip(chosen, gains, strict=True))
    words = (
        f"Two layers around a GELU, forward and backward, compiled for an H100 ({provenance(result)}; no "
        "GPU): roofline in float8 as a share of bfloat16's, and time saved by products less time added by "
        "rounding, compiled and as `worthwhile` estimates it. Of the layers that it chooses "
        f"{wrong or 'none'} lose."
    )
    cells = (
        [
            f"`{row['recipe']}`",
            f"{row['tokens']} x {row['features']} x {row['between']}",
            f"{row['of_bfloat16']:.2f}",
            f"{gain:+d} us",
            f"{round(sum(profit.saved - profit.added for profit in profits) * 1e6):+d} us",
            "yes" if is_chosen else "no",
        ]
        for row, gain, profits, is_chosen in zip(result["rows"], gains, estimates, chosen, strict=True)
    )
    header = " recipe | tokens x features x between | roofline | compiled | estimate | chosen"
    return "\n".join([*paragraph(words), *table(header, cells)])


def training() -> str:
    """Final losses over seeds, and errors of gradients."""
    result = load("fp8_training")
    rows = result["rows"]
    spread = {row["task"]: row["deviation"] for row in rows if row["policy"] == "float32"}
    over = [row for row in rows if abs(row["over_float32"]) > spread[row["task"]]]
    verdict = "; ".join(f"`{row['policy']}` on {row['task']}" for row in over) or "none"
    words = (
        f"Loss on unseen batches after training, mean over {result['seeds']} seeds, emulated on a CPU "
        f"({provenance(result)}), and how much it is over float32's with the same weights and batches. "
        f"Beyond the deviation over seeds in float32: {verdict}."
    )
    cells = (
        [
            row["task"],
            f"`{row['policy']}`",
            f"{row['loss']:.3f}",
            f"{row['deviation']:.3f}",
            f"{row['over_float32']:+.4f}",
            f"{row['deviation_of_that']:.4f}",
        ]
        for row in rows
    )
    header = " task | policy | loss | deviation | over float32 | deviation of that"
    lines = [*paragraph(words), *table(header, cells), ""]
    words = "Relative error of the gradient against float32, on models of the zoo at their tiny size:"
    lines += paragraph(words)
    names = [name for name in result["gradients"][0] if name not in ("model", "float8_share")]
    found = (
        [row["model"], f"{row['float8_share']:.0%}", *(f"{row[name]:.3f}" for name in names)]
        for row in result["gradients"]
    )
    columns = " | ".join(f"`{name}`" for name in names)
    return "\n".join([*lines, *table(f" model | FLOPs in float8 | {columns}", found)])
