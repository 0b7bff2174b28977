"""What a type checker says of the public names: `make types` reads this file, and nothing runs it."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Callable
from typing import Any, assert_type

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import jax.typing
import numpy as np
import optax

import jmp_policy as jmpp
import jmp_policy.linen
import jmp_policy.nnx


class Net(nn.Module):
    width: int

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class NNXNet(nnx.Module):
    width: int


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(x)


def loss_and_aux(params: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.mean(x), {"x": x}


def modules_keep_their_classes(net: Net, nnx_net: NNXNet, precision: jmpp.Precision) -> None:
    assert_type(jmpp.wrap(net, "mixed_float16"), Net)
    assert_type(jmpp.wrap(nnx_net, jmpp.PolicyMap("mixed_float16", {nnx.Linear: "float32"})), NNXNet)
    assert_type(jmp_policy.linen.wrap(net, "mixed_float16"), Net)
    assert_type(jmp_policy.nnx.wrap(nnx_net, "mixed_float16"), NNXNet)
    assert_type(precision.wrap(net).width, int)


def functions_keep_their_signatures(x: jax.Array) -> None:
    assert_type(jmpp.autocast(loss_fn, "float16")({}, x), jax.Array)
    assert_type(jmpp.full_precision(loss_fn)({}, x), jax.Array)
    assert_type(jmpp.report.tap(x, "name"), jax.Array)


def dtypes(dtype: jax.typing.DTypeLike, value: jax.typing.ArrayLike) -> None:
    policy = jmpp.Policy("float32", jnp.float16, np.dtype("float32"), grad_dtype=None)
    assert_type(policy.compute_dtype, np.dtype)
    assert_type(policy.with_output_dtype(dtype), jmpp.Policy)
    jmpp.Policy(dtype, dtype, dtype)
    assert_type(jmpp.DynamicLossScale(value).adjust(value).loss_scale, jax.Array)
    jmpp.Policy(1, "float16", "float32")  # pyright: ignore[reportArgumentType]


def optimizers(precision: jmpp.Precision) -> None:
    tx = jmpp.loss_scaled(optax.adamw(1e-3), jmpp.DynamicLossScale())
    assert_type(tx, optax.GradientTransformationExtraArgs)
    assert_type(precision.loss_scaled(optax.sgd(0.1)), optax.GradientTransformationExtraArgs)
    jmpp.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), {"a": jmpp.NoOpLossScale()}, count_mode="advance")
    jmpp.loss_scaled(optax.adamw, jmpp.NoOpLossScale())  # pyright: ignore[reportArgumentType]
    jmpp.loss_scaled(tx, 1024.0)  # pyright: ignore[reportArgumentType]
    jmpp.loss_scaled(tx, jmpp.NoOpLossScale(), count_mode="stay")  # pyright: ignore[reportArgumentType]


def gradients(x: jax.Array) -> None:
    loss, _ = jmpp.scaled_value_and_grad(loss_fn)({}, {}, x)
    assert_type(loss, jax.Array)
    (loss, aux), _ = jmpp.scaled_value_and_grad(loss_and_aux, has_aux=True)({}, {}, x)
    assert_type(aux, dict[str, jax.Array])
    loss, _ = jmp_policy.nnx.scaled_value_and_grad(loss_fn)({}, {}, x)
    assert_type(loss, jax.Array)


def states(state: optax.OptState, settings: dict[str, Any]) -> None:
    assert_type(jmpp.grads_finite(state), jax.Array)
    assert_type(jmpp.metrics(state)["loss_scale"], jax.Array)
    assert_type(jmpp.DynamicLossScale.from_dict(settings), jmpp.DynamicLossScale)
    assert_type(jmpp.StaticLossScale(2.0).adjust(True), jmpp.StaticLossScale)
    scales: list[jmpp.LossScale] = [jmpp.NoOpLossScale(), jmpp.PIDLossScale(), jmpp.StatisticLossScale()]
    assert_type(scales[0].loss_scale, jax.Array)


class State(jmp_policy.linen.TrainState):
    batch_stats: Any


def whole_steps(apply: Callable[..., Any], optimizer: jmp_policy.nnx.Optimizer, net: NNXNet) -> None:
    state = State.create(apply_fn=apply, params={}, tx=optax.sgd(0.1), precision="bf16", batch_stats={})
    assert_type(state, State)
    assert_type(state.apply_gradients(grads={}), State)
    assert_type(optimizer.minimize(loss_fn, net, jnp.ones(2)), jax.Array)


def reports(x: jax.Array) -> None:
    assert_type(jmpp.audit(loss_fn, {}, x, grad=True), jmpp.report.Audit)
    assert_type(jmpp.audit(loss_fn, {}, x).products[0].lhs, str)
    assert_type(jmpp.explain(loss_fn, "float16")({}, x), jmpp.report.Explanation)
