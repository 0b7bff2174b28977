"""Policies, their texts, and casting."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jmp_policy as jmpp
from jmp_policy._src.core.dtype_words import best_half_dtype
from jmp_policy._src.core.dtypes import is_dtype_or_none, is_half, promote_dtype

NAMES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("mixed_float16", ("float32", "float16", "float32")),
        ("mixed_bfloat16", ("float32", "bfloat16", "float32")),
        ("mixed_half", ("float32", "bfloat16", "float32")),
        ("float32", ("float32",) * 3),
        ("full", ("float32",) * 3),
        ("float16", ("float16",) * 3),
        ("bfloat16", ("bfloat16",) * 3),
        ("half", ("bfloat16",) * 3),
        (" Mixed_Float16 ", ("float32", "float16", "float32")),
        ("params=float32,compute=float16,output=float32", ("float32", "float16", "float32")),
        ("p=f32, c=f16, o=f32", ("float32", "float16", "float32")),
        ("p=f32,c=f16", ("float32", "float16", "float16")),
        ("c=bf16", ("float32", "bfloat16", "bfloat16")),
        ("p=f16", ("float16",) * 3),
        ("o = f16", ("float32", "float32", "float16")),
        ("p=full,c=half", ("float32", "bfloat16", "bfloat16")),
    ],
)
def test_texts(text, want):
    policy = jmpp.get_policy(text)
    assert tuple(d.name for d in (policy.param_dtype, policy.compute_dtype, policy.output_dtype)) == want
    assert policy.grad_dtype is None
    assert jmpp.get_policy(policy) is policy


@pytest.mark.slow
@given(*[st.sampled_from(NAMES)] * 3, st.sampled_from([None, *NAMES]))
def test_text_round_trip(params, compute, output, grad):
    policy = jmpp.Policy(params, compute, output, grad)
    again = jmpp.get_policy(str(policy))
    assert again == policy
    assert hash(again) == hash(policy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p=f32,c=fp61", "Unknown dtype 'fp61' in policy 'p=f32,c=fp61'. Did you mean 'fp16'"),
        ("mixed_fp16", "Did you mean 'mixed_float16'"),
        ("p=f32,q=f16", "Unknown part 'q=f16'"),
        ("parms=f32", "Did you mean 'params'"),
        ("p=f32,,c=f16", "Unknown part ''"),
        ("p=f32,p=f16", "sets 'params' twice"),
        ("c=int8", "not floating"),
        ("c=complex64", "not floating"),
        ("c=bool", "not floating"),
        ("", "Unknown policy ''"),
        ("mixed_fp8", "Unknown policy 'mixed_fp8'. Eight bits .* every tensor needs a scale"),
        ("c=f8", "Unknown dtype 'f8' in policy 'c=f8'. Eight bits .*recipe=fp8_current"),
        ("p=f32,c=e4m3", "Unknown dtype 'e4m3'.* Eight bits"),
        ("p=f32,c=f2", "Unknown dtype 'f2' in policy 'p=f32,c=f2'"),
        ("p=f4", "Unknown dtype 'f4'"),
        ("c=e", "Unknown dtype 'e'"),
        ("p=d", "Unknown dtype 'd'"),
        ("c=>f2", "Unknown dtype '>f2'"),
        ("c=float", "Unknown dtype 'float'"),
        ("c=longdouble", "Unknown dtype 'longdouble'"),
    ],
)
def test_bad_texts(text, message):
    with pytest.raises(ValueError, match=message):
        jmpp.get_policy(text)


def test_bad_types():
    with pytest.raises(TypeError, match="of type int"):
        jmpp.get_policy(16)
    with pytest.raises(ValueError, match="compute_dtype of a Policy is int32"):
        jmpp.Policy(jnp.float32, jnp.int32, jnp.float32)
    with pytest.raises(TypeError, match="output_dtype is missing"):
        jmpp.Policy(jnp.float32, jnp.float16, None)
    with pytest.raises(ValueError, match="Unknown dtype 'float61'"):
        jmpp.Policy("float61", "float16", "float32")
    for foreign in (np.dtype(">f2"), np.dtype(np.longdouble), jnp.ones(2), ["f16"], 16):
        with pytest.raises(ValueError, match="Unknown dtype"):
            jmpp.Policy("float32", foreign, "float32")


@pytest.mark.parametrize("take", [
    lambda word: jmpp.autocast(jnp.sin, f"c={word}"),
    lambda word: jmpp.region(word).__enter__(),
    lambda word: jmpp.half_moments(optax.adam(0.1), mu=word),
    lambda word: jmpp.sensitivity(jnp.sum, jnp.ones(2), dtype=word),
    lambda word: jmpp.recommend(jnp.sum, jnp.ones(2), dtype=word),
    lambda word: jmpp.accumulate_gradients(jnp.sum, 2, accumulator_dtype=word),
])  # fmt: skip
@pytest.mark.parametrize("word", ["f8", "e", "f2", ">f2"])
def test_words_for_dtypes_are_the_same_everywhere(take, word):
    with pytest.raises(ValueError, match=re.escape(repr(word))):
        take(word)


def test_a_value_of_a_policys_dict_sets_its_own_key_only():
    for settings in ({"compute": "f16,output=f32"}, {"compute": "f16", "c": "f32"}, {"compute": 16}, {}):
        with pytest.raises(ValueError, match=r"Unknown dtype|sets 'compute' twice|the mapping is empty"):
            jmpp.Policy.from_dict(settings)
    assert jmpp.Policy.from_dict({"c": jnp.float16, "recipe": None}) == jmpp.get_policy("c=f16")


@pytest.mark.parametrize("kind", [lambda d: d, np.dtype, lambda d: np.dtype(d).name])
def test_a_policy_takes_whatever_is_a_dtype(kind):
    policy = jmpp.Policy(kind(jnp.float32), kind(jnp.bfloat16), kind(jnp.float16))
    assert str(policy) == "params=float32,compute=bfloat16,output=float16"
    assert policy.with_output_dtype("float32").output_dtype == jnp.float32


POLICY = jmpp.get_policy("p=f32,c=f16,o=bf16")


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.arange(3),
        jnp.array([True]),
        jnp.ones(2, jnp.complex64),
        jax.random.key(0),
        np.zeros(2, jax.dtypes.float0),
        np.arange(3),
        None,
        "text",
        1.5,
        3,
        2j,
        nn.relu,
        object(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_not_floating_passes_as_the_same_object(leaf):
    for cast in (POLICY.cast_to_param, POLICY.cast_to_compute, POLICY.cast_to_output):
        assert cast(leaf) is leaf
        tree = {"a": [leaf]}
        assert cast(tree) is tree


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", *NAMES[4:6]])
@pytest.mark.parametrize("make", [jnp.ones, np.ones, jax.ShapeDtypeStruct])
def test_floating_leaves_are_cast(make, dtype):
    x = make((2, 3), dtype)
    cast = POLICY.cast_to_compute({"x": x, "n": 3})
    assert cast["x"].dtype == jnp.float16
    assert cast["x"].shape == (2, 3)
    assert type(cast["x"]) is type(x)
    assert POLICY.cast_to_compute(cast) is cast


def test_each_cast_has_a_dtype_of_its_own():
    x = jnp.ones(2)
    casts = (POLICY.cast_to_param, POLICY.cast_to_compute, POLICY.cast_to_output)
    assert [cast(x).dtype.name for cast in casts] == ["float32", "float16", "bfloat16"]


def test_the_sharding_of_an_abstract_array_is_kept():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    cast = POLICY.cast_to_compute(jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding))
    assert (cast.dtype, cast.sharding) == (jnp.float16, sharding)


def test_boxed_tracers_scalars_and_weak_types():
    box = nn.Partitioned(jnp.ones((2, 2)), names=(None, "model"))
    cast = POLICY.cast_to_compute(box)
    assert isinstance(cast, nn.Partitioned)
    assert cast.value.dtype == jnp.float16
    assert cast.names == (None, "model")
    assert jax.jit(POLICY.cast_to_compute)(jnp.float32(1)).dtype == jnp.float16
    assert POLICY.cast_to_compute(np.float32(2)).dtype == jnp.float16
    assert not POLICY.cast_to_compute(jnp.asarray(2.0)).aval.weak_type


def test_kinds_of_dtypes():
    dtypes = ["float8_e5m2", "float16", "bfloat16", "float32", "float64", "int8", "complex64"]
    assert [is_half(jnp.dtype(d)) for d in dtypes] == [True] * 3 + [False] * 4
    assert [promote_dtype(jnp.dtype(d)).name for d in dtypes] == ["float32"] * 4 + dtypes[4:]
    fields = [None, *dtypes[1:5], jnp.bfloat16, np.dtype("float16")]
    assert [is_dtype_or_none(field) for field in fields] == [True] * len(fields)
    assert not any(map(is_dtype_or_none, ["int8", "a text", jnp.int32, 3, nn.relu]))


def test_best_half_dtype_by_capability():
    class Device:
        def __init__(self, platform, capability=None):
            self.platform, self.compute_capability = platform, capability

    assert best_half_dtype(Device("gpu", "7.5")) == jnp.float16
    assert best_half_dtype(Device("gpu", "9.0")) == jnp.bfloat16
    assert best_half_dtype(Device("gpu", "10.0")) == jnp.bfloat16
    assert best_half_dtype(Device("rocm", "gfx90a")) == jnp.bfloat16
    assert best_half_dtype(Device("tpu")) == jnp.bfloat16
    assert best_half_dtype() == jnp.bfloat16


def test_a_policy_is_made_of_its_text_and_its_repr():
    half = jmpp.get_policy("mixed_bfloat16")
    assert jmpp.Policy("mixed_bfloat16") == half
    assert eval(repr(half), {"Policy": jmpp.Policy}) == half
    text = "p=f32, c=bf16, o=f32, g=f32, r=fp8_current"
    assert jmpp.Policy("mixed_bfloat16", grad_dtype="float32", recipe="fp8_current") == jmpp.Policy(text)
    with pytest.raises(ValueError, match="mixd_float16"):
        jmpp.Policy("mixd_float16")


def test_a_name_and_what_changes_it():
    changed = jmpp.get_policy("mixed_bfloat16, o=bf16, r=fp8_current")
    assert changed == jmpp.get_policy("p=f32,c=bf16,o=bf16,r=fp8_current")
    assert changed.with_compute_dtype("float16").recipe == "fp8_current"
    # Recipes are for products in half.
    assert changed.with_compute_dtype("float32") == jmpp.get_policy("p=f32,c=f32,o=bf16")
