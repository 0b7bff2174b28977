"""Are `sensitivity`, `recommend` and `drift` right? On the zoo at its tiny size, and six more structures.

`sensitivity`: does it rank modules as half precision does? The truth is the relative error of the gradient,
its mean square over three batches, when a rule puts one module, with all below it, into float16 and all
others into float32. At most `MODULES` modules of a model are measured, evenly from the ranking, as a program
is traced for each; the whole model is none of them.

`recommend_zoo`: does the policy that `recommend` gives fit its budget, with all in half that can be? Each
model has one batch and the default budget.

`drift_shares`: are the shares of `drift` right? They are parts of the square of the gradient's error. If a
module introduces a share s of it, the error without the module is sqrt(1 - s) of what it was. The module with
the largest share is put into float32. One draw of roundings says little of their mean: it is taken over three
batches and, for each, three sets of parameters that differ by 2 %.

Programs run operation by operation, so that each rounds as its dtype says; those of `recommend_zoo` are
compiled. The results are with `XLA_FLAGS=--xla_backend_optimization_level=0`, which compiles in less time, of
which they need most; half sums are then added up in another order, here and in `drift`.
"""

from collections import Counter
from typing import Any

import jax
import numpy as np

import jmp_policy as jmpp
from benchmarks.models import MODELS, faults
from benchmarks.models._model import squared_error
from benchmarks.models.structures import STRUCTURES
from benchmarks.table import Table
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.ir import evaluate

MODULES = 10
BATCHES = 3
#: Sets of parameters for each batch of `drift_shares`, and by which part they differ.
DRAWS, SPREAD = 3, 0.02


def loss_and_params(name: str) -> tuple[Any, Any, Any]:
    """The loss of `(params, batch)`, parameters and batches."""
    if name in faults.FAULTS:
        module, params = faults.FAULTS[name].model()

        def squares(params, batch):
            return squared_error(module.apply({"params": params}, batch[0]), batch[1])

        return squares, params, list(map(faults.batch, range(BATCHES)))
    model = STRUCTURES.get(name) or MODELS[name]("tiny")
    batches = [jax.jit(model.batch)(seed) for seed in range(BATCHES)]
    variables = jax.jit(model.module.init)(jax.random.key(0), *batches[0][0])
    rest = {kind: value for kind, value in variables.items() if kind != "params"}

    def loss_fn(params, batch):
        inputs, targets = batch
        out = model.module.apply({**rest, "params": params}, *inputs, mutable=list(rest))[0]
        return model.loss(out, targets)

    return loss_fn, variables["params"], batches


def under(loss_fn: Any, rules: Any, scale: float = 1.0) -> Any:
    """The loss of a model under rules, scaled."""

    def scaled(params, batch):
        with jmpp.linen.intercept(rules):
            return loss_fn(params, batch) * scale

    return scaled


def vector(grads: Any) -> np.ndarray:
    return np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grads)])


def gradients(loss_fn: Any, cases: Any, rules: Any, scale: float) -> list[np.ndarray]:
    """The gradient for each pair of parameters and batch under rules, one operation after the other."""

    def bind(eqn, values):
        return compat.bind_primitive(eqn.primitive, values, eqn.params)

    jaxpr = jax.make_jaxpr(jax.grad(under(loss_fn, rules, scale)))(*cases[0])
    found = [evaluate(jaxpr, jax.tree.leaves(case), bind) for case in cases]
    return [vector(grads) / scale for grads in found]


def errors(found: list[np.ndarray], exact: list[np.ndarray]) -> list[float]:
    return [float(np.linalg.norm(f - e) / np.linalg.norm(e)) for f, e in zip(found, exact, strict=True)]


def digits(x: float) -> float:
    return float(f"{x:.3g}")


def ranked(name: str) -> list[dict[str, Any]]:
    """The rank correlation of predicted and measured errors of a model's modules."""
    loss_fn, params, batches = loss_and_params(name)
    more = [(batch,) for batch in batches[1:]]
    ranking = jmpp.sensitivity(loss_fn, params, batches[0], batches=more)
    rows = [r for r in ranking.rows if r.path]
    rows = [rows[round(i)] for i in np.linspace(0, len(rows) - 1, min(MODULES, len(rows)))]
    cases = [(params, batch) for batch in batches]
    exact = gradients(loss_fn, cases, "float32", 1.0)
    measured = []
    for r in rows:
        rules = jmpp.PolicyMap("float32", {f"{r.path}/**": "mixed_float16"})
        each = errors(gradients(loss_fn, cases, rules, ranking.loss_scale), exact)
        measured.append(digits(np.sqrt(np.mean(np.square(each)))))
    predicted = [digits(r.predicted) for r in rows]
    return [{"modules": len(rows), "spearman": round(spearman(predicted, measured), 3)}]


def spearman(a: Any, b: Any) -> float:
    """Correlation of ranks; equal values share the mean of theirs."""

    def ranks(values):
        values = np.asarray(values)
        return (values[:, None] > values).sum(1) + (values[:, None] == values).sum(1) / 2

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def recommended(name: str) -> list[dict[str, Any]]:
    loss_fn, params, (batch, *_) = loss_and_params(name)
    found = jmpp.recommend(loss_fn, params, batch, dtype="float16")
    half, scale = jmpp.PolicyMap("mixed_float16"), float(found.loss_scale.loss_scale)
    all_half = found.measured
    if found.policy != half:
        exact, rounded = (
            vector(jax.jit(jax.grad(under(loss_fn, rules, by)))(params, batch)) / by
            for rules, by in (("float32", 1.0), (half, scale))
        )
        (all_half,) = errors([rounded], [exact])
    return [
        {
            "budget": found.budget,
            "error": digits(found.measured),
            "share of FLOPs in half": round(found.half_share, 4),
            "rules": {str(pattern): str(policy) for pattern, policy in found.policy.overrides},
            "error with all in half": digits(all_half),
        }
    ]


#: Planted faults whose gradient is finite.
FINITE = (
    "Fourier features of 2e4", "rotary positions of 29,000", "squares of 300", "sum in a loop",
    "exponential mean", "preconditioning by noise", "discounted returns", "Euler steps of 1e-4",
    "harmonic mean",
)  # fmt: skip
#: Small versions whose gradients overflow in float16 with this scale.
OVERFLOWING = ("DeepSpeech2", "SSD300, VGG-16")
#: Of the loss: no cotangent of the others is near overflow with it, nor near zero.
SCALE = 2.0**13
#: Rules of both runs. A loop's carry keeps the dtype in which it enters, so that half input keeps it half
#: between float32 layers.
BESIDES = {"Scanned gated Transformer": {"embedding": "float32"}}


def shares_of(loss_fn: Any, params: Any, batch: Any) -> tuple[dict[str, float], float]:
    """The shares that `drift` finds, by the model's own modules, and that of turned decisions."""
    shares, found = dict[str, float](), jmpp.drift(loss_fn, params, batch, scale=SCALE)
    for row in found.rows:
        _, _, top = row.module.partition("/")
        top = top.partition("/")[0].partition(".")[0]
        shares[top] = shares.get(top, 0.0) + row.share
    shares.pop("", None)  # The model's own operations, which no rule puts into float32 alone.
    return shares, found.turned


def spread(params: Any, draw: int) -> Any:
    """The parameters, each times a random number near 1."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(draw), len(leaves))
    factors = (1 + SPREAD * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True))
    return tree.unflatten([x * by for x, by in zip(leaves, factors, strict=True)])


def worst(name: str) -> list[dict[str, Any]]:
    """Predicted and measured effect of the module with the largest share, over all cases together."""
    loss_fn, params, batches = loss_and_params(name)
    half = jmpp.PolicyMap("mixed_float16", BESIDES.get(name, {}))
    cases = [(spread(params, draw), batch) for draw in range(DRAWS) for batch in batches]
    exact = gradients(loss_fn, cases, "float32", 1.0)

    def squares(rules: Any) -> np.ndarray:
        return np.square(errors(gradients(loss_fn, cases, rules, SCALE), exact))

    before, shares, turned = squares(half), Counter[str](), 0.0
    for (drawn, batch), square in zip(cases, before, strict=True):
        found, decided = shares_of(under(loss_fn, half), drawn, batch)
        turned += decided * square / before.sum()
        for module, share in found.items():
            shares[module] += share * square / before.sum()
    module = max(shares, key=shares.__getitem__)
    after = squares(jmpp.PolicyMap(half.default, {f"{module}/**": "float32", **dict(half.overrides)}))
    return [
        {
            "module": module,
            "share": round(float(shares[module]), 3),
            "turned": round(float(turned), 3),
            "error": digits(np.sqrt(before.mean())),
            "without": digits(np.sqrt(after.mean())),
            "without / error": digits(np.sqrt(after.sum() / before.sum())),
            "predicted": digits(np.sqrt(max(1 - shares[module], 0))),
        }
    ]


ALL = (*MODELS, *STRUCTURES)
TABLES = (
    Table("sensitivity", ranked, by={"model": ALL}),
    Table("recommend_zoo", recommended, by={"model": ALL}),
    Table("drift_shares", worst, by={"model": (*(name for name in ALL if name not in OVERFLOWING), *FINITE)}),
)
