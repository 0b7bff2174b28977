"""Tables of docs/float8.md: steps, recipes with blocks, what `worthwhile` chooses, what training loses."""

import numpy as np

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
    losses = {(row["task"], row["policy"]): np.array(row["losses"]) for row in result["rows"]}
    seeds = result["seeds"]
    cells, beyond = [], []
    for (task, policy), found in losses.items():
        over = {base: found - losses[task, base] for base in ("float32", "bfloat16")}
        t = _t_value(over["bfloat16"])
        if policy not in over and abs(t) > _T_LIMIT[seeds]:
            beyond.append(f"`{policy}` on {task} ({over['bfloat16'].mean():+.4f})")
        pairs = [] if policy == "float32" else [over["float32"]]
        pairs += [over["bfloat16"]] if policy not in over else []
        texts = [text for pair in pairs for text in (f"{pair.mean():+.4f}", f"{pair.std(ddof=1):.4f}")]
        cells.append([task, f"`{policy}`", f"{found.mean():.3f}", *(texts + [""] * 4)[:4]])
    words = (
        f"Loss on unseen batches after training, mean over {seeds} seeds, emulated on a CPU "
        f"({provenance(result)}). The differences are paired: each run less that of the same seed, weights "
        "and batches in float32 or bfloat16, as mean and deviation over seeds. Beyond what chance does to "
        f"the mean of {seeds} pairs (t-test against bfloat16, 1 % level): {', '.join(beyond) or 'none'}."
    )
    header = " task | policy | loss | over float32 | deviation | over bfloat16 | deviation"
    lines = [*paragraph(words), *table(header, cells), ""]
    gradients = [row for row in result["gradients"] if row["float8_share"]]
    none = [row["model"] for row in result["gradients"] if not row["float8_share"]]
    lines += paragraph(
        "Relative error of the gradient against float32, on the zoo at its tiny size. "
        "Recipes with blocks take sizes of multiples of 32, the others of 16: an error like bfloat16's means "
        "that few or no products are in float8. The second column is of `fp8_current`. No product suits "
        f"float8: {'; '.join(none)}."
    )
    names = [name for name in gradients[0] if name not in ("model", "float8_share")]
    found = (
        [row["model"], f"{row['float8_share']:.0%}", *(f"{row[name]:.3f}" for name in names)]
        for row in gradients
    )
    columns = " | ".join(f"`{name}`" for name in names)
    return "\n".join([*lines, *table(f" model | FLOPs in float8 | {columns}", found)])


#: Values of Student's t that chance exceeds, on either side, once in a hundred times, by number of pairs.
_T_LIMIT = {5: 4.604}


def _t_value(pairs: np.ndarray) -> float:
    """Mean over its standard error; 0 where all are equal to 0."""
    error = pairs.std(ddof=1) / np.sqrt(len(pairs))
    return float(pairs.mean() / error) if error else 0.0
