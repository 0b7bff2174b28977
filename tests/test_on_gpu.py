"""Training on a GPU of this machine; `JAX_PLATFORMS=cuda,cpu pytest -m gpu` runs these, others skip them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_policy as jmpp
from jmp_policy._src.core.targets import target_of_device
from jmp_policy._src.report.lowering.kernels import kernels_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs a GPU"),
]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(32, (3, 3))(x)))
        x = x.reshape(len(x), -1)
        return nn.Dense(10)(nn.LayerNorm()(nn.relu(nn.Dense(256)(x))))


def batch_of(size=256):
    """Images that show their class as a bright square, in noise."""
    key, noise = jax.random.split(jax.random.key(0))
    labels = jax.random.randint(key, (size,), 0, 10)
    images = jax.random.normal(noise, (size, 16, 16, 1))
    return images.at[jnp.arange(size), labels, 3:8, 0].add(4.0), labels


def training(policy, scale):
    """The jitted step of `Net`, and its first state: parameters, statistics, and the optimizer's."""
    model, tx = jmpp.wrap(Net(), policy), jmpp.loss_scaled(optax.adamw(3e-3), scale)
    images, labels = batch_of()
    variables = model.init(jax.random.key(1), images)

    def step(params, stats, opt_state):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": stats}
            logits, new = model.apply(variables, images, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), new["batch_stats"]

        (loss, new), grads = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        stats = jmpp.select_tree(jmpp.grads_finite(opt_state), new, stats)
        return optax.apply_updates(params, updates), stats, opt_state, loss

    params = variables["params"]
    return jax.jit(step, donate_argnums=(0, 1, 2)), (params, variables["batch_stats"], tx.init(params))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_training_learns_to_the_end_with_a_scale_that_begins_too_large(policy):
    """The first steps overflow in float16 and are skipped; all end with the same small loss."""
    half = policy == "mixed_float16"
    scale = jmpp.DynamicLossScale(2.0**30, max_loss_scale=2.0**30) if half else jmpp.NoOpLossScale()
    step, state = training(policy, scale)
    losses = []
    for _ in range(80):
        *state, loss = step(*state)
        losses.append(float(loss))
    assert losses[0] > 2
    assert losses[-1] < 0.02
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state[:2]))
    if half:
        metrics = jmpp.metrics(state[2])
        assert int(metrics["skipped_steps"]) > 0
        assert float(metrics["loss_scale"]) < 2.0**30


def test_a_skipped_step_changes_no_bit_of_what_was_donated():
    step, state = training("mixed_float16", jmpp.DynamicLossScale(2.0**40, max_loss_scale=2.0**40))
    before = jax.tree.map(np.asarray, jax.tree.map(jnp.copy, state[:2]))
    *after, loss = step(*state)
    assert np.isfinite(loss)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, tuple(after[:2])))
    assert float(jmpp.metrics(after[2])["loss_scale"]) == 2.0**39


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", ["wrap", "autocast", "nnx"])
def test_the_products_that_run_have_half_operands(way, half):
    """In the program that was compiled for this card, with what its autotuner chose."""
    x = jnp.ones((512, 512))
    if way == "nnx":
        graph, params = nnx.split(jmpp.nnx.wrap(nnx.Linear(512, 512, rngs=nnx.Rngs(0)), f"mixed_{half}"))
        loss = lambda params, x: nnx.merge(graph, params)(x).sum()  # noqa: E731
    else:
        model = nn.Dense(512)
        params = model.init(jax.random.key(0), x)
        wrapped = jmpp.wrap(model, f"mixed_{half}") if way == "wrap" else model
        loss = lambda params, x: (wrapped.apply(params, x) ** 2).sum()  # noqa: E731
        loss = jmpp.autocast(loss, half) if way == "autocast" else loss
    compiled = jax.jit(jax.grad(loss)).lower(params, x).compile()
    target = target_of_device(jax.devices()[0].device_kind)
    if target is None:
        pytest.skip(f"{jax.devices()[0].device_kind} is not in the list of cards")
    products = [kernel for kernel in kernels_of(compiled.as_text(), target) if kernel.flops]
    assert [kernel.operands for kernel in products] == [f"{half} x {half}"] * max(1, len(products))


def test_gradients_are_those_of_the_cpu():
    """In half precision on both, as far as half precision goes."""
    x = jax.random.normal(jax.random.key(0), (64, 128))
    model = jmpp.wrap(nn.Sequential([nn.Dense(256), nn.LayerNorm(), nn.gelu, nn.Dense(16)]), "mixed_float16")

    def gradient(device):
        with jax.default_device(device):
            params = jax.device_put(model.init(jax.random.key(1), x), device)
            given = jax.device_put(x, device)
            return jax.grad(lambda p: (model.apply(p, given) ** 2).mean())(params)

    try:
        cpu = jax.devices("cpu")[0]
    except RuntimeError:
        pytest.skip("JAX_PLATFORMS has no cpu beside the GPU")
    on_gpu, on_cpu = (jax.tree.map(np.asarray, gradient(d)) for d in (jax.devices()[0], cpu))
    for a, b in zip(jax.tree.leaves(on_gpu), jax.tree.leaves(on_cpu), strict=True):
        assert np.linalg.norm(a - b) <= 3e-3 * np.linalg.norm(b)


def test_float8_products_are_near_those_of_bfloat16():
    target = target_of_device(jax.devices()[0].device_kind)
    if target is None or "float8" not in target.rates:
        pytest.skip("this card has no float8 products")
    x = jax.random.normal(jax.random.key(0), (1024, 1024))
    params = nn.Dense(1024).init(jax.random.key(1), x)

    def outputs(policy):
        model = jmpp.wrap(nn.Dense(1024), policy)
        compiled = jax.jit(model.apply).lower(params, x).compile()
        return compiled(params, x), [k for k in kernels_of(compiled.as_text(), target) if k.flops]

    wide, _ = outputs("mixed_bfloat16")
    narrow, products = outputs("mixed_bfloat16, r=fp8_current")
    assert any("float8" in kernel.operands for kernel in products), products
    assert jnp.linalg.norm(narrow - wide) < 0.06 * jnp.linalg.norm(wide)


def test_reports_compile_for_the_card_of_this_machine():
    """With the plugin that runs it, whatever version of CUDA it is for."""
    x = jnp.ones((256, 256))
    params = nn.Dense(256).init(jax.random.key(0), x)
    model = jmpp.wrap(nn.Dense(256), "mixed_float16")
    report = jmpp.lowering_report(jax.grad(lambda p, x: model.apply(p, x).sum()), params, x, target="H100")
    assert "on Tensor Cores in float16" in str(report)
    assert jmpp.diagnose(jax.grad(lambda p, x: model.apply(p, x).sum()), params, x).finite
