"""Do reports find planted faults, and are they silent about models without one?

`planted_faults`: each model of `models/faults.py` under mixed_float16, in Linen and NNX. `diagnose` looks if
its gradient is not finite, else `drift`. Right is the place if it is the planted part, and the cause if it is
one of the operations that `FAULTS` names. Then the policy that is advised is applied, and the error measured
on other data.

`healthy_models`: what `audit`, `diagnose` and `drift` say against models that train well in float16.

`planted_parts`: what `recommend` gives where the fault is one part of a larger model; the worst of three
batches of other data.

XLA may leave out roundings (`--xla_allow_excess_precision`); errors here are of programs compiled with that
off.
"""

import os
import time
import warnings
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

import jmp_policy as jmpp
from benchmarks.accuracy.modules import ALL, digits, errors, loss_and_params, vector
from benchmarks.models._model import squared_error
from benchmarks.models.faults import FAULTS, Fault, Net, batch
from benchmarks.table import Table

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false --xla_backend_optimization_level=0"
)

#: A model whose gradient is off by less is mended.
MENDED = 0.02


def loss_under(module: nn.Module, policy: Any = None) -> Any:
    """The mean squared error of a model under a policy, or of the bare one."""
    model = module if policy is None else jmpp.wrap(module, policy)
    return lambda params, x, targets: squared_error(model.apply({"params": params}, x), targets)


def error_of(module: nn.Module, policy: Any, params: Any, data: Any, scale: float = 1.0) -> float:
    """The relative error of the gradient under a policy."""

    def gradient(rules: Any) -> Any:
        loss = loss_under(module, rules)
        return jax.jit(jax.grad(lambda *args: loss(*args) * scale))(params, *data)

    return error_between(gradient(policy), gradient("float32"))


def error_of_nnx(model: nnx.Module, policy: Any, data: Any) -> float:
    """The same of an NNX model."""

    def gradient(rules: Any) -> Any:
        return nnx.jit(nnx.grad(nnx_loss))(jmpp.wrap(model, rules), *data)

    return error_between(gradient(policy), gradient("float32"))


def nnx_loss(model: nnx.Module, x: Any, targets: Any) -> Any:
    return squared_error(model(x), targets)


def error_between(half: Any, exact: Any) -> float:
    (error,) = errors([vector(half)], [vector(exact)])
    return error if np.isfinite(error) else float("inf")


def found_fault(name: str) -> list[dict[str, Any]]:
    """What reports say of one planted fault, in Linen and in NNX, and what the advice does."""
    fault = FAULTS[name]
    module, params = fault.model()
    linen = looked_at(
        fault,
        loss_under(module, "mixed_float16"),
        params,
        lambda policy, seed: error_of(module, policy, params, batch(seed)),
    )
    model = fault.nnx_model()
    if model is None:
        return [linen]
    wrapped = jmpp.wrap(model, "mixed_float16")
    in_nnx = looked_at(
        fault, nnx_loss, wrapped, lambda policy, seed: error_of_nnx(model, policy, batch(seed))
    )
    return [linen | {f"nnx_{key}": in_nnx[key] for key in ("place", "cause", "named", "after", "mended")}]


def looked_at(fault: Fault, loss: Any, params: Any, error: Any) -> dict[str, Any]:
    """What reports say.

    Args:
      fault: the fault.
      loss, params: under mixed_float16.
      error: gives that of the gradient under a policy, for the data of a seed.
    """
    before = error("mixed_float16", 0)
    start = time.process_time()
    if np.isfinite(before):
        found: Any = jmpp.drift(loss, params, *batch(0))
        row = found.contributions[0]
        place, operation = row.module, row.operation
    else:
        found = jmpp.diagnose(loss, params, *batch(0))
        at = found.zero or found
        place, operation = at.path, at.operation
    seconds = time.process_time() - start
    lost = [constant.path for constant in found.constants]
    tried = found.tried if found.advice else ()
    advised = next((one for one in tried if dict(one.rule) == dict(found.rule)), None)
    after = float("nan") if advised is None else error(advised.policy, 1)
    places = [place, *lost] if "constant" in fault.causes else [place]
    return {
        "report": type(found).__name__,
        "place": any(fault.path in at for at in places),
        "cause": operation in fault.causes or bool(lost and "constant" in fault.causes),
        "named": f"{place}: {operation}",
        "before": digits(before),
        "advice": "" if advised is None else advised.text,
        "after": digits(after),
        "mended": bool(after <= MENDED),
        "seconds": round(seconds, 1),
        "lines": len(str(found).splitlines()),
    }  # fmt: skip


class Deep(nn.Module):
    """A large model with one part: Dense layers of 256, and the part in between, on 32 of their outputs."""

    fault: str

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.gelu(nn.Dense(256, name=f"before_{i}")(x))
        y = Net(FAULTS[self.fault].fn, FAULTS[self.fault].nested, name="net")(x)
        return nn.Dense(4, name="out")(nn.LayerNorm(name="norm")(x)) + y


#: Faults of `planted_parts`, one of each kind.
PARTS = (
    "Fourier features of 2e4",
    "rotary positions of 29,000",
    "squares of 300",
    "mean by / 70000",
    "decays near 1",
    "variance as a difference",
    "discounted returns",
    "time of a diffusion model",
)
#: A rule of thumb to compare with; these models have no softmax outside of the parts.
BY_THUMB = {nn.LayerNorm: "float32"}


def recommended_part(name: str) -> list[dict[str, Any]]:
    """What `recommend` gives for a model with one part, beside a rule of thumb and brute force."""
    module, fault = Deep(name), FAULTS[name]
    params = module.init(jax.random.key(0), batch(0)[0])["params"]
    found = jmpp.recommend(loss_under(module), params, *batch(0), dtype="float16")
    scale = float(found.loss_scale.loss_scale)

    def worst(policy: Any) -> float:
        return digits(max(error_of(module, policy, params, batch(seed), scale) for seed in (1, 2, 3)))

    # Brute force: the module whose rule leaves the least error.
    parts = (fault.path, *(("block",) if fault.nested else ()), "first", "last")
    paths = [*(f"net/{part}" for part in parts), *(f"before_{i}" for i in range(3)), "out"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tried = {path: worst(jmpp.PolicyMap("mixed_float16", {path: "float32"})) for path in paths}
    best = min(tried, key=tried.__getitem__)
    return [{
        "all in half": worst("mixed_float16"),
        "policy": repr(found.policy),
        "share of FLOPs in half": round(found.half_share, 4),
        "error on other data": worst(found.policy),
        "by thumb": worst(jmpp.PolicyMap("mixed_float16", BY_THUMB)),
        "brute force": best,
        "its error": tried[best],
    }]  # fmt: skip


ACTIVATIONS = (
    "relu", "relu6", "sigmoid", "softplus", "sparse_plus", "soft_sign", "silu", "log_sigmoid", "leaky_relu",
    "hard_sigmoid", "hard_silu", "hard_tanh", "tanh", "elu", "celu", "selu", "gelu", "glu", "squareplus",
    "mish", "identity", "softmax", "log_softmax", "logsumexp", "standardize",
)  # fmt: skip


def activation(name: str) -> Any:
    """A part that is one of `jax.nn`'s functions."""
    fn = getattr(jax.nn, name)
    return lambda module, x: fn(x, axis=-1, keepdims=True) + x if name == "logsumexp" else fn(x)


LAYERS = {
    "LayerNorm": lambda: nn.LayerNorm(),
    "RMSNorm": lambda: nn.RMSNorm(),
    "GroupNorm": lambda: nn.GroupNorm(4),
    "InstanceNorm": lambda: nn.InstanceNorm(),
    "WeightNorm": lambda: nn.WeightNorm(nn.Dense(32), variable_filter=None),
    "Dense": lambda: nn.Dense(32),
    "DenseGeneral": lambda: nn.DenseGeneral((4, 8)),
    "Conv": lambda: nn.Conv(8, (3,)),
    "ConvTranspose": lambda: nn.ConvTranspose(8, (3,)),
    "depthwise Conv": lambda: nn.Conv(32, (3,), feature_group_count=32),
    "Einsum": lambda: nn.Einsum((32, 16), "...d,de->...e"),
    "attention": lambda: nn.SelfAttention(4),
    "attention with dropout": lambda: nn.SelfAttention(4, dropout_rate=0.1, deterministic=True),
    "LSTM": lambda: nn.RNN(nn.OptimizedLSTMCell(16)),
    "GRU": lambda: nn.RNN(nn.GRUCell(16)),
    "simple RNN": lambda: nn.RNN(nn.SimpleCell(16)),
    "bidirectional": lambda: nn.Bidirectional(nn.RNN(nn.GRUCell(16)), nn.RNN(nn.GRUCell(16))),
    "PReLU": lambda: nn.PReLU(),
}


def layer(name: str) -> Any:
    """A part that is one of Flax's layers, on four sequences."""

    def part(module, x):
        out = LAYERS[name]()(x.reshape(4, -1, x.shape[-1]))
        return out.reshape(len(x), -1)

    return part


HEALTHY = {
    **{f"jax.nn.{name}": activation(name) for name in ACTIVATIONS},
    **{f"nn.{name}": layer(name) for name in LAYERS},
    **dict.fromkeys(ALL),
}


def complaints(name: str) -> list[dict[str, Any]]:
    """What three reports say against a model without a fault."""
    if name in ALL:
        loss_fn, params, (batch, *_) = loss_and_params(name)
        args: Any = (batch,)

        def loss(params: Any, batch: Any) -> Any:
            with jmpp.linen.intercept("mixed_float16"):
                return loss_fn(params, batch)

    else:
        x, targets = (jax.random.normal(jax.random.key(seed), (16, size)) for seed, size in ((0, 16), (1, 4)))
        module, args = Net(HEALTHY[name]), (x, targets)
        loss, params = loss_under(module, "mixed_float16"), module.init(jax.random.key(0), x)["params"]
    scale = 2.0**10
    audit = jmpp.audit(loss, params, *args, grad=True)
    diagnosis = jmpp.diagnose(loss, params, *args, scale=scale)
    drift = jmpp.drift(loss, params, *args, scale=scale)
    said = [
        *(f"audit: upcast in {u.place}" for u in audit.upcasts),
        *(f"audit: constant {c.written} in {c.place}" for c in audit.constants),
        *(
            f"audit: {h.operation} in {h.place}"
            for h in audit.half_operations
            if f"{h.operation} in {h.dtype} {h.why}" in audit.verdict
        ),
        *([] if diagnosis.finite else [f"diagnose: {diagnosis.operation} in {diagnosis.place}"]),
        *(["drift: not normal"] if not drift.is_normal else []),
        *([f"drift: {drift.advice}"] if drift.advice else []),
        *(f"drift: constant {c.written}" for c in drift.constants),
    ]
    counted = {"complaints": len(said), "said": "; ".join(said), "error": digits(drift.error)}
    return [counted | {"lines": [len(str(r).splitlines()) for r in (audit, diagnosis, drift)]}]


TABLES = (
    Table("planted_faults", found_fault, by={"fault": FAULTS}, about={"mended": MENDED}),
    Table("healthy_models", complaints, by={"model": HEALTHY}),
    Table("planted_parts", recommended_part, by={"fault": PARTS}),
)
