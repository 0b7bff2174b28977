"""Every way to make a Linen module, under every kind of policy."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs import CONSTRUCTS
from flax import traverse_util
from flax.core import meta
from helpers import dtypes, loss_of, products

import jmp_policy as jmpp

POLICIES = ["mixed_float16", "mixed_bfloat16", "p=f16,c=f16,o=f32"]


def rngs():
    return {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def is_norm(path):
    return any("Norm" in part or part.endswith("_ln") for part in path[:-1])


@pytest.mark.parametrize("policy", POLICIES[::2])
@pytest.mark.parametrize("case", CONSTRUCTS, ids=repr)
def test_same_variables_and_initial_values_as_the_bare_module(case, policy):
    policy, x = jmpp.get_policy(policy), case.inputs()
    bare, wrapped = case.make(), jmpp.wrap(case.make(), policy)
    # Compiled as one program each: one operation at a time takes five times as long.
    want, got = (jax.jit(model.init)(rngs(), x) for model in (bare, wrapped))
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for path, value in traverse_util.flatten_dict(meta.unbox(got["params"])).items():
        expected = traverse_util.flatten_dict(meta.unbox(want["params"]))[path]
        for e, v in zip(jax.tree.leaves(expected), jax.tree.leaves(value), strict=True):
            if jnp.issubdtype(e.dtype, jnp.floating) and not is_norm(path):
                e = e.astype(policy.param_dtype)
            assert v.dtype == e.dtype, path
            # A last digit may differ with what was compiled together; values drawn in half are others.
            # SpectralNorm stores the normalised kernel, computed here from float16 parameters.
            rtol, atol = (2.0**-9, 1e-4) if policy.param_dtype == jnp.float16 else (2e-6, 1e-7)
            np.testing.assert_allclose(v, e, rtol=rtol, atol=atol, err_msg=str(path))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CONSTRUCTS, ids=repr)
def test_every_product_is_in_compute_dtype_forward_and_backward(case, policy):
    policy, x = jmpp.get_policy(policy), case.inputs()
    model = jmpp.wrap(case.make(), policy)
    variables = meta.unbox(jax.eval_shape(model.init, rngs(), x))
    state = {k: v for k, v in variables.items() if k != "params"}

    def loss(params, state):
        out, new = model.apply(
            {"params": params, **state}, x, mutable=list(state), rngs={"dropout": jax.random.key(1)}
        )
        return jax.tree.reduce(lambda s, y: s + jnp.sum(y.astype(jnp.float32) ** 2), out, 0.0), (out, new)

    found = products(jax.value_and_grad(loss, has_aux=True, allow_int=True), variables["params"], state)
    half = np.dtype(policy.compute_dtype).name
    # Power iteration of SpectralNorm runs on the float32 weights.
    in_half = {key: n for key, n in found.items() if key[1:] == (half, half)}
    others = {key: n for key, n in found.items() if key not in in_half}
    assert in_half
    assert not others or (case.name == "norms" and all("float32" in k for k in others)), others

    # Abstractly: what the step returns, without compiling it.
    grads, (out, new) = jax.eval_shape(
        jax.grad(loss, has_aux=True, allow_int=True), variables["params"], state
    )
    assert set(jax.tree.leaves(dtypes(out))) == {np.dtype(policy.output_dtype).name}
    assert dtypes(new) == dtypes(state)
    for g, p in zip(jax.tree.leaves(grads), jax.tree.leaves(variables["params"]), strict=True):
        assert g.dtype == p.dtype or not jnp.issubdtype(p.dtype, jnp.floating)


@pytest.mark.parametrize("case", CONSTRUCTS, ids=repr)
def test_close_to_float32(case):
    """Half precision rounds every operation by at most 2**-11; these models are a dozen deep."""
    x = case.inputs()
    bare, wrapped = case.make(), jmpp.wrap(case.make(), "mixed_float16")
    variables = jax.jit(bare.init)(rngs(), x)
    mutable = [k for k in variables if k != "params"]
    run = {"mutable": mutable, "rngs": {"dropout": jax.random.key(1)}}
    want, _ = jax.jit(functools.partial(bare.apply, **run))(variables, x)
    got, _ = jax.jit(functools.partial(wrapped.apply, **run))(variables, x)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        bound = 64 * 2.0**-11 * float(jnp.linalg.norm(a))
        assert float(jnp.linalg.norm(a - b)) <= bound


@pytest.mark.parametrize("case", CONSTRUCTS, ids=repr)
def test_float32_policy_changes_nothing(case):
    x = case.inputs()
    bare, wrapped = case.make(), jmpp.wrap(case.make(), "float32")
    variables = jax.jit(bare.init)(rngs(), x)
    mutable = [k for k in variables if k != "params"]
    run = {"mutable": mutable, "rngs": {"dropout": jax.random.key(1)}}
    want = jax.jit(functools.partial(bare.apply, **run))(variables, x)
    got = jax.jit(functools.partial(wrapped.apply, **run))(variables, x)
    chex.assert_trees_all_equal(got, want)
    chex.assert_trees_all_equal_dtypes(got, want)


@pytest.mark.parametrize("case", CONSTRUCTS, ids=repr)
def test_init_variants_agree(case):
    x, model = case.inputs(), jmpp.wrap(case.make(), "mixed_float16")
    want = dtypes(meta.unbox(jax.eval_shape(model.init, rngs(), x)))
    out, variables = jax.eval_shape(model.init_with_output, rngs(), x)
    assert dtypes(meta.unbox(variables)) == want
    assert set(jax.tree.leaves(dtypes(out))) == {"float32"}
    lazy = model.lazy_init(rngs(), jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert dtypes(meta.unbox(lazy)) == want
    assert "params" in model.tabulate(rngs(), x)


def test_mutable_collections_are_updated_and_keep_their_dtypes():
    case = next(c for c in CONSTRUCTS if c.name == "stateful")
    model, x = jmpp.wrap(case.make(), "mixed_float16"), case.inputs()
    variables = model.init(rngs(), x)
    _, new = loss_of(model, variables, x)(variables["params"])
    assert int(new["counts"]["n"]) == 1
    assert new["stats"]["mean"].dtype == jnp.float32


def test_capture_intermediates_are_in_compute_dtype():
    model, x = jmpp.wrap(CONSTRUCTS[1].make(), "mixed_float16"), CONSTRUCTS[1].inputs()
    variables = model.init(rngs(), x)
    out, state = model.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    captured = state["intermediates"]
    assert out.dtype == jnp.float32
    assert captured["layers_0"]["__call__"][0].dtype == jnp.float16
    bare = CONSTRUCTS[1].make()
    _, plain = bare.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    assert jax.tree.structure(plain) == jax.tree.structure(state)


def test_user_methods():
    model, x = jmpp.wrap(CONSTRUCTS[2].make(), "mixed_float16"), CONSTRUCTS[2].inputs()
    cls = type(CONSTRUCTS[2].make())
    variables = model.init(rngs(), x)
    for method in ("encode", cls.encode, lambda m, x: m.encode(x)):
        found = products(lambda v, m=method: model.apply(v, x, method=m), variables)
        assert list(found) == [("dot_general", "float16", "float16")]
        assert model.apply(variables, x, method=method).dtype == jnp.float32


def test_decode_cache():
    attend = nn.MultiHeadDotProductAttention(2, decode=True)
    model, x = jmpp.wrap(attend, "mixed_float16"), jnp.ones((2, 5, 8))
    variables = model.init(rngs(), x)
    cache = variables["cache"]
    assert cache["cached_key"].dtype == jnp.float16
    for i in range(3):
        out, new = model.apply(
            {"params": variables["params"], "cache": cache}, x[:, i : i + 1], mutable=["cache"]
        )
        cache = new["cache"]
    assert int(cache["cache_index"]) == 3
    assert out.dtype == jnp.float32
