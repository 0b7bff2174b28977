"""What float32 weight gradients from half products (`grad=float32`) cost, against the same policy without.

On the CPU: tracing, bytes, temporary memory and time of a train step, as ratios of two steps measured in
turn. On an H100, compiled only: kernels, bytes and temporary memory of a BERT-width AdamW step. On eight of
them: what they send per step, and in which dtype.
"""

from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jmp_policy as jmpp
from benchmarks import _measure, _models, _record, _steps, gpu_target
from benchmarks.loss_scaling_cost import BATCH, LENGTH, WIDTHS

REPEATS = 11
POLICIES = {"grad=None": "mixed_float16", "grad=float32": "p=f32,c=f16,o=f32,g=f32"}


def measured(model: str) -> dict[str, Any]:
    """One row: ratios of the step with float32 weight gradients over the one without."""
    cls, make_batch = _models.TABLE[model]
    batch = make_batch()
    tx = optax.adamw(1e-3)
    steps, states, compiled = {}, {}, {}
    found: dict[str, dict[str, list[float]]] = {name: {"trace_lower": [], "step": []} for name in POLICIES}
    for name, policy in POLICIES.items():
        wrapped = jmpp.wrap(cls(), policy)
        states[name] = jax.jit(lambda batch, m=wrapped: _steps.init(m, tx, batch))(batch)
        steps[name] = _steps.plain_step(wrapped, tx)
    for repeat in range(REPEATS + 1):
        for name, step in steps.items():
            times, traced, lowered = _measure.trace_times(step, (states[name], batch), repeat)
            if repeat == 0:
                _, compiled[name] = _measure.compile_time(lowered)
                found[name] |= {q: [n] for q, n in _measure.counts(traced, compiled[name]).items()}
            else:
                found[name]["trace_lower"].append(times["trace_lower"])
    for _ in range(REPEATS):
        for name in steps:
            found[name]["step"].append(_measure.step_time(compiled[name], states[name], batch))
    row: dict[str, Any] = {"model": model}
    for quantity in ("trace_lower", *_measure.COUNTS, "step"):
        values, base = (found[name][quantity] for name in ("grad=float32", "grad=None"))
        row[quantity] = _measure.compare(quantity, values, base)
    return row


def on_gpu() -> list[dict[str, Any]]:
    """Rows for one H100."""
    reports = {}
    for name, policy in POLICIES.items():
        model, tx = jmpp.wrap(_models.Encoder(**WIDTHS), policy), optax.adamw(1e-4)
        batch = (jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32),) * 2
        state = jax.eval_shape(lambda batch, m=model, tx=tx: _steps.init(m, tx, batch), batch)
        step = jax.jit(_steps.plain_step(model, tx), donate_argnums=0)
        reports[name] = gpu_target.compile_for_gpu(step, (state, batch))
    return gpu_target.table_rows(reports, {"grad=float32": "grad=None"})


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1024)(nn.relu(nn.Dense(4096)(x)))


def on_eight_gpus() -> list[dict[str, Any]]:
    """Bytes that each of eight H100s hands to collectives per step, by operation and dtype."""
    rows = []
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    for layout, spec in (("data parallel", PartitionSpec()), ("FSDP", PartitionSpec("data"))):
        for name, policy in POLICIES.items():
            model = jmpp.wrap(Two(), policy)
            shapes = jax.eval_shape(model.init, jax.random.key(0), x)
            place = NamedSharding(mesh, spec)
            params = jax.tree.map(lambda s, p=place: s.update(sharding=p), shapes)

            def loss(params: Any, x: Any, model: Any = model) -> Any:
                return (model.apply(params, x) ** 2).mean()

            step = jax.jit(jax.grad(loss), out_shardings=jax.tree.map(lambda s: s.sharding, params))
            report = jmpp.lowering_report(step, params, x, target="H100")
            sent = Counter()
            for collective in report.collectives:
                sent[f"{collective.collective} {collective.operands}"] += collective.bytes_read
            rows.append({"layout": layout, "variant": name, **sent})
    return rows


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    _record.save("grad_dtype_cost", [measured(model) for model in _models.TABLE])
    try:
        _record.save("grad_dtype_gpu_cost", on_gpu(), target="NVIDIA H100 80GB, compiled only", **WIDTHS)
        _record.save("grad_dtype_collectives", on_eight_gpus(), target="8 x NVIDIA H100 80GB, compiled only")
    except (gpu_target.PluginMissingError, jmpp.LoweringUnavailableError) as error:
        print(f"Skipped the GPU. {error}")


if __name__ == "__main__":
    main()
