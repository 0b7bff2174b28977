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
#: A policy is data to the library, so other policies than the first are tried on two constructs: one whose
#: norms are islands, and one whose cell runs in a lifted loop.
IN_FULL = ("norms", "scan_cell")


def rngs():
    return {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def is_norm(path):
    return any("Norm" in part or part.endswith("_ln") for part in path[:-1])


@functools.cache
def bare_run(case):
    """Input, variables and results of the bare model, compiled: one operation at a time takes far longer."""
    x, bare = case.inputs(), case.make()
    variables = jax.jit(bare.init)(rngs(), x)
    return x, variables, compiled_apply(bare, variables)(variables, x)


def compiled_apply(model, variables):
    mutable = [k for k in variables if k != "params"]
    return jax.jit(functools.partial(model.apply, mutable=mutable, rngs={"dropout": jax.random.key(1)}))


def check_dtypes(got, want, policy):
    """Parameters have the param dtype, but for those of norms; all else is as in the bare model."""
    assert jax.tree.structure(want) == jax.tree.structure(got)
    params = [traverse_util.flatten_dict(meta.unbox(variables["params"])) for variables in (got, want)]
    for path, value in params[0].items():
        for v, e in zip(*map(jax.tree.leaves, (value, params[1][path])), strict=True):
            half = jnp.issubdtype(e.dtype, jnp.floating) and not is_norm(path)
            assert v.dtype == (policy.param_dtype if half else e.dtype), path
            yield path, v, e


@pytest.mark.slow
@pytest.mark.parametrize("case", CONSTRUCTS, ids=repr)
def test_same_variables_and_initial_values_as_the_bare_module(case):
    """Values once per construct; those drawn in half for two, whose dtypes are looked at in all."""
    x, want, _ = bare_run(case)
    for text in ("mixed_float16", "p=f16,c=f16,o=f32"):
        policy = jmpp.get_policy(text)
        wrapped = jmpp.wrap(case.make(), policy)
        half = policy.param_dtype == jnp.float16
        if half and case.name not in IN_FULL:
            assert list(check_dtypes(jax.eval_shape(wrapped.init, rngs(), x), want, policy))
            continue
        for path, v, e in check_dtypes(jax.jit(wrapped.init)(rngs(), x), want, policy):
            # A last digit may differ with what was compiled together; values drawn in half are others.
            # SpectralNorm stores the normalised kernel, computed here from float16 parameters.
            rtol, atol = (2.0**-9, 1e-4) if half else (2e-6, 1e-7)
            np.testing.assert_allclose(v, e.astype(v.dtype), rtol=rtol, atol=atol, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "policy"),
    [(c, p) for c in CONSTRUCTS for p in POLICIES if c.name in IN_FULL or p == POLICIES[0]],
    ids=str,
)
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


@pytest.mark.once
@pytest.mark.parametrize("case", CONSTRUCTS, ids=repr)
def test_close_to_float32_and_in_float32_the_same(case):
    """Half precision rounds every operation by at most 2**-11; these models are a dozen deep."""
    x, variables, want = bare_run(case)
    run = {p: compiled_apply(jmpp.wrap(case.make(), p), variables) for p in ("mixed_float16", "float32")}
    got, _ = run["mixed_float16"](variables, x)
    for a, b in zip(jax.tree.leaves(want[0]), jax.tree.leaves(got), strict=True):
        bound = 64 * 2.0**-11 * float(jnp.linalg.norm(a))
        assert float(jnp.linalg.norm(a - b)) <= bound
    got = run["float32"](variables, x)
    chex.assert_trees_all_equal(got, want)
    chex.assert_trees_all_equal_dtypes(got, want)


@pytest.mark.once
@pytest.mark.parametrize("case", CONSTRUCTS, ids=repr)
def test_init_variants_agree(case):
    x, model = case.inputs(), jmpp.wrap(case.make(), "mixed_float16")
    out, variables = jax.eval_shape(model.init_with_output, rngs(), x)
    want = dtypes(meta.unbox(variables))
    assert set(jax.tree.leaves(dtypes(out))) == {"float32"}
    if case.name in IN_FULL:
        lazy = model.lazy_init(rngs(), jax.ShapeDtypeStruct(x.shape, x.dtype))
        assert dtypes(meta.unbox(lazy)) == want
        assert dtypes(meta.unbox(jax.eval_shape(model.init, rngs(), x))) == want
        assert "params" in model.tabulate(rngs(), x)


def test_mutable_collections_are_updated_and_keep_their_dtypes():
    case = next(c for c in CONSTRUCTS if c.name == "stateful")
    model, x = jmpp.wrap(case.make(), "mixed_float16"), case.inputs()
    variables = model.init(rngs(), x)
    _, new = loss_of(model, variables, x)(variables["params"])
    assert int(new["counts"]["n"]) == 1
    assert new["stats"]["mean"].dtype == jnp.float32


@pytest.mark.slow
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


@pytest.mark.slow
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


class Passed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(8)], name="mlp")(x)
        return nn.Dense(8, name="head")(x)


@pytest.mark.parametrize(("default", "other"), [("float32", "mixed_float16"), ("mixed_float16", "float32")])
def test_a_rule_governs_the_layers_that_are_passed_to_a_module(default, other):
    x = jnp.ones((2, 16))
    model = jmpp.wrap(Passed(), jmpp.PolicyMap(default, {"mlp": other}))
    variables, policy = (
        model.init(jax.random.key(0), x),
        {"Dense_0": other, "Dense_1": other, "head": default},
    )

    def dtypes_of(model):
        return {p.path.split("/")[-1]: p.lhs for p in jmpp.audit(model.apply, variables, x).products}

    wanted = {name: str(jmpp.get_policy(text).compute_dtype) for name, text in policy.items()}
    assert dtypes_of(model) == wanted
    named = jmpp.PolicyMap(default, {"mlp": other, "Dense_1": default})
    assert dtypes_of(jmpp.wrap(Passed(), named)) == wanted | {"Dense_1": wanted["head"]}


def test_a_module_above_follows_no_rule_of_one_that_calls_it():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return self.parent.project(x)

    class Outer(nn.Module):
        def setup(self):
            self.dense, self.inner = nn.Dense(8), Inner()

        def project(self, x):
            return self.dense(x)

        def __call__(self, x):
            return self.inner(x)

    x = jnp.ones((2, 16))
    model = jmpp.wrap(Outer(), jmpp.PolicyMap("mixed_float16", {"inner": "float32"}))
    assert [d for _, d, _ in products(model.apply, model.init(jax.random.key(0), x), x)] == ["float16"]
