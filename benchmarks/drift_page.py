"""Tables of docs/drift.md: whether shares predict, and what `drift` costs."""

from benchmarks._tables import grouped, load, paragraph, provenance, table

#: Columns of the table of costs: program, quantity.
_COSTS = {
    "time, `drift_metrics`": ("drift, result", "cpu_time"),
    "time, per module": ("drift, module", "cpu_time"),
    "time, per operation": ("drift, operation", "cpu_time"),
    "memory, per module": ("drift, module", "memory"),
}


def shares() -> str:
    """Whether the module that `drift` blames most is that much of the error."""
    result = load("drift_shares")
    words = (
        "The module with the largest share is put into float32, and the error of the "
        "gradient is measured again, in float16 and operation by operation "
        f"({provenance(result)}). If a module introduces a share s of the squared error, the error without "
        "it is sqrt(1 - s) of what it was."
    )
    cells = (
        [
            row["model"],
            f"`{row['module']}`",
            f"{row['share']:.0%}",
            *(f"{row[k]:.2f}" for k in ("predicted", "without / error")),
        ]
        for row in result["rows"]
    )
    header = " | module | share | error without it, predicted | measured"
    return "\n".join([*paragraph(words), *table(header, cells)])


def cost() -> str:
    """Time and memory of `drift`, as multiples of the loss and its gradients in float32."""
    result = load("drift_cost")
    machine = result["machine"]
    words = (
        "In CPU time and memory of the loss and its gradients in float32 (`python -m benchmarks.drift_cost`, "
        f"{machine['cores']} cores of {machine['cpu']}, medians of ratios; {provenance(result)}). The models "
        "are small, so that sums over activations weigh much beside products:"
    )
    cells = (
        [model, *(f"{found[program][quantity]:.1f}" for program, quantity in _COSTS.values())]
        for model, found in grouped(result["rows"], "model", "program").items()
    )
    return "\n".join([*paragraph(words), *table("".join(f" | {name}" for name in _COSTS), cells)])
