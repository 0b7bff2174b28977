"""One setting of a config becomes a policy and a loss scale, and goes back into a config."""

import functools
import json
import pickle
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import optax
import pytest
import yaml
from flax import nnx

import jmp_policy as jmpp

SCALES = {
    "none": jmpp.NoOpLossScale(),
    "static": jmpp.StaticLossScale(128.0),
    "dynamic": jmpp.DynamicLossScale(2.0**10, growth_interval=7, hysteresis=2),
    "statistic": jmpp.StatisticLossScale(margin=3),
    "pid": jmpp.PIDLossScale(kp=0.5),
}
WORDS = {
    "float32": (False, None, "no", "NO", "fp32", 32, "32-true", "full"),
    "mixed_float16": ("fp16", "f16", 16, "16", "16-mixed", "fp16-mixed", " mixed_float16 "),
    "mixed_bfloat16": ("bf16", "bf16-mixed", "mixed_bfloat16", "p=f32, c=bf16, o=f32"),
    "float16": ("float16", "16-true", {"params": "f16"}),
    "bfloat16": ("bfloat16", "bf16-true", {"p": "bf16", "c": "bf16"}, "p=bf16"),
    "float64": (64, "64-true"),
    "p=f32,c=bf16,o=f32,g=f32": ({"params": "float32", "compute": "bf16", "output": "f32", "grad": "f32"},),
}


@pytest.mark.parametrize(("policy", "word"), [(p, word) for p, words in WORDS.items() for word in words])
def test_words_of_configs(policy, word):
    precision = jmpp.from_config(word)
    assert precision.policy == jmpp.PolicyMap(policy)
    dynamic = precision.policy.default.compute_dtype == jnp.float16
    assert isinstance(precision.loss_scale, jmpp.DynamicLossScale if dynamic else jmpp.NoOpLossScale)
    assert jmpp.from_config(yaml.safe_load(yaml.safe_dump({"x": word}))["x"]) == precision


def test_auto_is_mixed_precision_in_the_half_type_of_the_device():
    half = jmpp.best_half_dtype().name
    assert jmpp.from_config("auto").policy == jmpp.PolicyMap(f"mixed_{half}")


SETTINGS = {
    "policy": "fp16",
    "rules": [["**/head", "fp32"], ["flax.linen:Embed", "p=f32,c=bf16"]],
    "float32_islands": False,
    "loss_scale": {"type": "dynamic", "loss_scale": 256, "growth_interval": 9},
}


@pytest.mark.parametrize(
    "read",
    [
        dict,
        json.dumps,
        ml_collections.ConfigDict,
        ml_collections.FrozenConfigDict,
        lambda s: yaml.safe_load(yaml.safe_dump(s)),
        lambda s: {**s, "rules": dict(s["rules"])},
    ],
)
def test_mappings(read):
    precision = jmpp.from_config(read(SETTINGS))
    rules = {"**/head": "float32", nn.Embed: "p=f32, c=bf16"}
    assert precision.policy == jmpp.PolicyMap("mixed_float16", rules, float32_islands=False)
    assert repr(precision.loss_scale) == repr(jmpp.DynamicLossScale(256.0, growth_interval=9))
    # There and back, by way of what JSON and YAML can hold.
    text = json.dumps(precision.to_dict())
    assert jmpp.from_config(text) == jmpp.from_config(yaml.safe_load(text)) == precision
    assert json.dumps(jmpp.from_config(text).to_dict()) == text
    assert hash(jmpp.from_config(text)) == hash(precision)
    assert pickle.loads(pickle.dumps(precision)) == precision


@pytest.mark.parametrize("kind", SCALES)
def test_loss_scales_there_and_back(kind):
    scale = SCALES[kind]
    precision = jmpp.Precision("mixed_float16", scale)
    settings = precision.to_dict()["loss_scale"]
    assert settings["type"] == kind
    again = jmpp.from_config(json.loads(json.dumps(precision.to_dict())))
    assert repr(again.loss_scale) == repr(scale)
    assert again == precision
    assert kind == "none" or jmpp.Precision("mixed_float16", "none") != precision


def through_yaml_and_json(settings):
    return json.loads(json.dumps(yaml.safe_load(yaml.safe_dump(settings))))


@pytest.mark.parametrize("kind", SCALES)
def test_each_loss_scale_reads_and_writes_itself(kind):
    scale = SCALES[kind]
    settings = scale.to_dict()
    assert next(iter(settings)) == "type"
    assert {type(value) for value in settings.values()} <= {str, int, float}
    assert through_yaml_and_json(settings) == settings
    again = type(scale).from_dict(ml_collections.ConfigDict(through_yaml_and_json(settings)))
    assert repr(again) == repr(scale)
    assert jax.tree.structure(again) == jax.tree.structure(scale)
    # All arguments but those of none have a default, and the type may be left out.
    assert kind == "static" or repr(type(scale).from_dict({})) == repr(type(scale)())
    other = jmpp.StaticLossScale if kind != "static" else jmpp.DynamicLossScale
    with pytest.raises(ValueError, match=f"{other.__name__}.from_dict .*these are of the type '{kind}'"):
        other.from_dict(settings)
    with pytest.raises(ValueError, match=f"Unknown key 'growth' in the settings of the loss scale '{kind}'"):
        type(scale).from_dict({"growth": 1})


def test_the_dict_of_a_scale_in_training_has_its_current_number():
    scale = jmpp.DynamicLossScale(2.0**10, growth_interval=2).adjust(True).adjust(True).adjust(True)
    assert scale.to_dict()["loss_scale"] == 2.0**11
    assert int(jmpp.DynamicLossScale.from_dict(scale.to_dict()).growth_tracker) == 0
    # log2(1000) is no float32 number; the text is short, and makes the same leaf.
    for value in (1000.0, 3.0, 2.0**20, 123456.0):
        pid = jmpp.PIDLossScale(value)
        assert pid.to_dict()["loss_scale"] == value
        assert jmpp.PIDLossScale.from_dict(pid.to_dict()).log2_scale == pid.log2_scale
    moved = jmpp.PIDLossScale(1000.0).adjust(True)
    assert jmpp.PIDLossScale.from_dict(moved.to_dict()).log2_scale == moved.log2_scale


class OwnScale(jmpp.DynamicLossScale):
    pass


def test_loss_scales_that_have_no_dict():
    with pytest.raises(TypeError, match="OwnScale has no name in a config"):
        OwnScale().to_dict()
    with pytest.raises(TypeError, match="OwnScale has no name in a config"):
        OwnScale.from_dict({})
    with pytest.raises(ValueError, match="outside of jax.jit and jax.vmap"):
        jax.eval_shape(lambda scale: scale.to_dict(), jmpp.PIDLossScale())
    for abstract in (jax.eval_shape(jmpp.PIDLossScale), jax.vmap(jmpp.StaticLossScale)(jnp.ones(2))):
        with pytest.raises(ValueError, match="a leaf that is none"):
            abstract.to_dict()
    with pytest.raises(ValueError, match="cannot be made: .*loss_scale"):
        jmpp.StaticLossScale.from_dict({})


def test_the_scales_of_several_losses_read_and_write_themselves():
    tx = jmpp.loss_scaled(optax.sgd(0.1), {"a": jmpp.DynamicLossScale(8.0), "b": jmpp.StaticLossScale(2.0)})
    scales = jmpp.optim.get_loss_scale_state(tx.init(jnp.ones(3))).loss_scale
    settings = scales.to_dict()
    assert settings["b"] == {"type": "static", "loss_scale": 2.0}
    again = jmpp.optim.LossScales.from_dict(through_yaml_and_json(settings))
    assert repr(again) == repr(scales)
    read = jmpp.from_config({"loss_scale": settings}).loss_scale
    assert {name: scale.to_dict() for name, scale in read.items()} == settings


def test_numbers_that_yaml_reads_as_texts():
    settings = yaml.safe_load("{a: {loss_scale: 1e4}, b: 1e4, c: {type: static, loss_scale: 1e4}}")
    assert settings["b"] == "1e4"
    for setting in settings.values():
        scale = jmpp.from_config({"policy": "fp16", "loss_scale": setting}).loss_scale
        assert float(scale.loss_scale) == 1e4


def test_loss_scale_settings():
    def scale(setting, policy="bf16"):
        return jmpp.from_config({"policy": policy, "loss_scale": setting}).loss_scale

    assert isinstance(scale("auto", "p=f32,c=f16"), jmpp.DynamicLossScale)
    assert isinstance(scale("dynamic"), jmpp.DynamicLossScale)
    assert isinstance(scale("none", "fp16"), jmpp.NoOpLossScale)
    assert isinstance(scale(False, "fp16"), jmpp.NoOpLossScale)
    assert float(scale(1024).loss_scale) == 1024
    assert scale({"growth_interval": 3}).growth_interval == 3
    several = scale({"critic": "dynamic", "actor": {"type": "pid"}})
    assert {name: type(s) for name, s in several.items()} == {
        "critic": jmpp.DynamicLossScale,
        "actor": jmpp.PIDLossScale,
    }
    assert jmpp.from_config(jmpp.Precision("mixed_float16", several).to_dict()).loss_scale.keys() == {
        "actor",
        "critic",
    }
    # What is done to the mapping later changes nothing.
    setting = {"type": "static", "loss_scale": 8.0}
    precision = jmpp.Precision("float32", setting)
    setting["loss_scale"] = 16.0
    assert float(precision.loss_scale.loss_scale) == 8
    # A rule that computes in float16 is enough.
    assert isinstance(
        jmpp.from_config({"policy": "fp32", "rules": {"body": "fp16"}}).loss_scale, jmpp.DynamicLossScale
    )


@pytest.mark.slow
def test_a_config_trains():
    x, y = jnp.linspace(-1, 1, 16)[:, None], jnp.linspace(2, -2, 16)[:, None]
    for word in ("no", "bf16", "fp16"):
        precision = jmpp.from_config(word)
        model, tx = precision.wrap(nn.Dense(1)), precision.loss_scaled(optax.sgd(0.5), monitor=True)
        params = model.init(jax.random.key(0), x)
        state = tx.init(params)

        @jax.jit
        def step(params, state, model=model, tx=tx):
            loss, grads = jmpp.scaled_value_and_grad(lambda p: jnp.mean((model.apply(p, x) - y) ** 2))(
                state, params
            )
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        for _ in range(30):
            params, state, loss = step(params, state)
        assert loss < 1e-3
        assert model.apply(params, x).dtype == jnp.float32


WRONG = {
    "fp8": "Unknown policy .fp8.. Eight bits.*other libraries' fp16, bf16",
    "bf61": "Unknown policy 'bf61'",
    "{policy": "looks like JSON",
    True: "is True, as YAML reads yes and on. Name it: 'fp16'",
    2.5: "got 2.5 of type float",
    ("fp16",): "of type tuple",
}


@pytest.mark.parametrize("setting", WRONG)
def test_wrong_words(setting):
    with pytest.raises((ValueError, TypeError), match=WRONG[setting]):
        jmpp.from_config(setting)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"polcy": "fp16"}, "Unknown key 'polcy'.*Did you mean 'policy'"),
        ({"policy": "fp16", "rules": ["head"]}, "pairs of pattern and policy.*got 'head'"),
        ({"policy": "fp16", "rules": {"no.such:Class": "fp32"}}, "'no.such:Class'.*cannot be imported"),
        ({"policy": "fp16", "rules": {"flax.linen:Dens": "fp32"}}, "'flax.linen:Dens'.*cannot be imported"),
        ({"policy": "fp16", "rules": {"head": "fp23"}}, "Unknown policy 'fp23'"),
        ({"policy": "fp16", "loss_scale": "dynamc"}, "Unknown loss scale 'dynamc'. Did you mean 'dynamic'"),
        ({"policy": "fp16", "loss_scale": 0}, "loss_scale is 0, outside"),
        ({"policy": "fp16", "loss_scale": True}, "Unknown loss scale True"),
        (
            {"policy": "fp16", "loss_scale": {"type": "dynamo"}},
            "Unknown type 'dynamo'.*Did you mean 'dynamic'",
        ),
        ({"policy": "fp16", "loss_scale": {"type": "dynamic", "growth": 3}}, "Unknown key 'growth'"),
        (
            {"policy": "fp16", "loss_scale": {"type": "dynamic", "growth_interval": 0}},
            "growth_interval must be",
        ),
        ({"policy": "fp16", "loss_scale": {"type": "static"}}, "cannot be made.*loss_scale"),
        ({"params": "f32", "compute": "fp61"}, "Unknown dtype 'fp61'.*Did you mean 'fp16'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        jmpp.from_config(settings)


def test_what_has_no_name_in_a_config_is_named():
    with pytest.raises(ValueError, match="pattern .*<lambda> cannot be written as text"):
        jmpp.PolicyMap("float32", {lambda path, module: True: "float16"}).to_dict()

    class Mine(jmpp.StaticLossScale):
        pass

    with pytest.raises(TypeError, match="class .*Mine has no name in a config"):
        jmpp.Precision("mixed_float16", Mine(8.0)).to_dict()
    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(lambda s: jmpp.Precision("float32", s).to_dict() and 0)(jmpp.StaticLossScale(8.0))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("fp16", "mixed_float16"),
        ("16-mixed", "mixed_float16"),
        (" BF16 ", "mixed_bfloat16"),
        ("bf16-mixed", "mixed_bfloat16"),
        ("no", "float32"),
        ("16-true", "float16"),
        ("bf16, g=f32", "mixed_bfloat16,g=f32"),
    ],
)
def test_words_mean_the_same_wherever_a_policy_is_taken(word, name):
    policy, x = jmpp.get_policy(name), jnp.ones((2, 8))
    assert jmpp.get_policy(word) == policy
    assert jmpp.PolicyMap(word, {"head": word}) == jmpp.PolicyMap(name, {"head": name})
    assert jmpp.from_config(word).policy == jmpp.PolicyMap(name)
    assert jmpp.linen.policy_of(jmpp.wrap(nn.Dense(8), word)) == jmpp.PolicyMap(name)
    if policy.recipe is None:
        dots = [str(jax.make_jaxpr(jmpp.autocast(jnp.dot, p))(x, x.T)) for p in (word, name)]
        assert dots[0] == dots[1]


def test_a_precision_is_taken_where_rules_are():
    precision = jmpp.Precision(jmpp.PolicyMap("fp16", {"head": "fp32"}))
    assert jmpp.linen.policy_of(jmpp.wrap(nn.Dense(8), jmpp.from_config("fp16"))) == jmpp.PolicyMap("fp16")
    model = jmpp.nnx.wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jmpp.from_config("bf16"))
    assert jmpp.nnx.policy_of(model) == jmpp.get_policy("mixed_bfloat16")
    x = jnp.ones((8, 8))
    assert "f16[8,8]" in str(jax.make_jaxpr(jmpp.autocast(jnp.dot, jmpp.from_config("fp16")))(x, x))
    assert precision.policy.overrides[0][1] == jmpp.get_policy("float32")


def test_dtypes_of_torch_are_read():
    """Without torch: what it has in common with other dtypes is its text."""
    torch_float16 = type("dtype", (), {"__module__": "torch", "__repr__": lambda self: "torch.float16"})()
    assert jmpp.Policy("float32", torch_float16, "float32") == jmpp.get_policy("mixed_float16")


def test_policies_and_rules_there_and_back():
    for text in ("mixed_float16", "bfloat16", "p=f32,c=f16,o=f32,g=f32"):
        policy = jmpp.get_policy(text)
        assert jmpp.Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    rules = jmpp.PolicyMap("mixed_float16", {nn.Dense: "float32", "a/*": "bfloat16"}, keep_module_dtypes=True)
    assert jmpp.PolicyMap.from_dict(json.loads(json.dumps(rules.to_dict()))) == rules
    with pytest.raises(ValueError, match="need the key 'policy'"):
        jmpp.PolicyMap.from_dict({"rules": []})


def test_other_spellings_are_answered_with_the_right_one():
    with pytest.raises(TypeError, match="Write 'mixed_bfloat16' for float32 parameters, or 'bfloat16'"):
        jmpp.get_policy(jnp.bfloat16)
    for settings, word in (
        ({"mixed_precision": "fp16"}, "policy"),
        ({"policy": "fp16", "loss_scale": {"init_scale": 8.0}}, "loss_scale"),
        ({"policy": "fp16", "loss_scale": {"init_loss_scale": 8.0}}, "loss_scale"),
        ({"policy": "fp16", "loss_scale": {"min": 8.0}}, "min_loss_scale"),
        ({"policy": "fp16", "loss_scale": {"scale_window": 8}}, "growth_interval"),
    ):
        with pytest.raises(ValueError, match=f"Did you mean '{word}'"):
            jmpp.from_config(settings)
    with pytest.raises(TypeError, match=r"Rules are jmp_policy\.PolicyMap.*; jmp_policy\.from_config"):
        jmpp.wrap(nn.Dense(2), {"policy": "mixed_float16"})
    with pytest.raises(TypeError, match=r"no regular expression.*lambda path, module: expression\.search"):
        jmpp.PolicyMap("float32", {re.compile("head"): "float16"})
    config = ml_collections.ConfigDict({"head": "float32"})
    assert jmpp.PolicyMap("float16", config) == jmpp.PolicyMap("float16", {"head": "float32"})


@pytest.mark.slow
def test_reading_a_config_asks_for_no_device():
    program = (
        "import jax, jmp_policy\n"
        "from unittest import mock\n"
        "with mock.patch.object(jax, 'devices', side_effect=AssertionError):\n"
        "    jmp_policy.from_config({'policy': 'fp16', 'loss_scale': 'dynamic', 'rules': {'head': 'no'}})\n"
        "assert not jax._src.xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("word", "read"), [("false", False), ("No", False), ("on", True), (" TRUE ", True)])
def test_flags_are_read_as_yaml_writes_them(word, read):
    for name in ("keep_module_dtypes", "float32_islands", "keep_small_inputs"):
        for settings in ({"policy": "fp16", name: word}, {"policy": "fp16", name: read}):
            assert getattr(jmpp.from_config(settings).policy, name) is read
        assert getattr(jmpp.PolicyMap("float32", **{name: word}), name) is read


@pytest.mark.parametrize("value", ["", "falsch", 0, 1, None, [], 0.0])
def test_what_is_no_flag_is_refused(value):
    with pytest.raises(
        ValueError, match=re.escape(f"keep_module_dtypes must be true or false, got {value!r}")
    ):
        jmpp.from_config({"policy": "fp16", "keep_module_dtypes": value})


def test_numbers_may_be_text_and_are_not_booleans():
    settings = {"growth_interval": "500", "loss_scale": "1e3", "growth_factor": "4"}
    scale = jmpp.from_config({"policy": "fp16", "loss_scale": settings}).loss_scale
    assert (scale.growth_interval, float(scale.loss_scale), scale.growth_factor) == (500, 1000.0, 4.0)
    for name, value in (("loss_scale", True), ("growth_factor", True), ("growth_interval", "5.5")):
        with pytest.raises(ValueError, match=name):
            jmpp.from_config({"policy": "fp16", "loss_scale": {name: value}})


CYCLIC: dict = {"policy": "fp16"}
CYCLIC["rules"] = [["head", CYCLIC]]
DEEP = functools.reduce(lambda inner, _: [inner], range(5000), "float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "fp16", "loss_scale": 10**400}, "loss_scale must be finite"),
        ({"policy": "fp16", "loss_scale": {"growth_factor": 10**5000}}, "growth_factor must be finite"),
        ({"policy": "fp16", "loss_scale": {"growth_interval": 10**5000}}, "growth_interval must be between"),
        ({"policy": 10**5000}, "a value of type int"),
        ("[" * 5000, "looks like JSON and is none"),
        ({"policy": "fp16", "rules": DEEP}, "more than 20 levels deep at rules/0/0/0/0/0/0/0/..."),
        (CYCLIC, "more than 20 levels deep at rules/0/1/rules/0/1/rules/0/..."),
        ({"policy": "fp16", "rules": 5}, "'rules' are pairs of pattern and policy"),
        ({"policy": "fp16", "rules": False}, "'rules' are pairs of pattern and policy"),
        ({"policy": "fp16", "loss_scale": {}}, "mapping from losses to loss scales is empty"),
        ({"policy": "fp16", "loss_scale": {"a": {"b": 8}}}, "Unknown key 'b'"),
        ({"policy": "fp16", "loss_scale": {1: 8}}, "Losses are named by text"),
        ({"policy": "fp16", "loss_scale": {"type": None}}, "Unknown type None"),
        ({"policy": "fp16", "loss_scale": True}, "Unknown loss scale True"),
        ({"policy": {}}, "the mapping is empty"),
        ({"params": "f32", "compte": "f16"}, "Unknown part 'compte=f16'"),
        ({"policy": "fp16", "rules": {"body": "fp16", "head": "fp61"}}, "The rule for 'head' has no policy"),
        ({"policy": "fp16", "rules": [["head", "c=f8"]]}, "Eight bits"),
    ],
)
def test_damaged_configs_are_refused_where_they_are_read(settings, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        jmpp.from_config(settings)
