"""What newcomers get wrong, and whether the answer says what to write instead.

A mistake is made, and the error or the warnings are graded: 3 says the repair, 2 is an error of this library
without it, 1 an error of another library, 0 silence.
"""

import pathlib
import re
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_policy as jmpp

LIBRARY = str(pathlib.Path(jmpp.__file__).parent)

NET = nn.Dense(8)
X = jnp.ones((4, 8))
PARAMS = {"w": jnp.ones(2)}
SGD, SCALE = optax.sgd(0.1), jmpp.DynamicLossScale()
TX = jmpp.loss_scaled(SGD, SCALE)


class Equinox:
    """A model of a library that makes models callable pytrees."""

    def __call__(self, x: Any) -> Any:
        return x


class Torch:
    """A tensor of another library."""

    dtype = "torch.float32"


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4, name="head")(nn.relu(nn.Dense(16, name="body")(x)))


class Unnamed(nnx.Module):
    def __init__(self) -> None:
        self.body, self.norm = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.norm(self.body(x))


def square(params: Any) -> Any:
    return jnp.sum(params["w"] ** 2)


def gradients(state: Any, *args: Any, loss: Any = square, **kwargs: Any) -> Any:
    return jmpp.scaled_value_and_grad(loss, **kwargs)(state, *args)


def step(tx: Any, params: Any = PARAMS, grads: Any = None, *, jit: bool = True, **kwargs: Any) -> Any:
    """One update by gradients that are computed as the case says; by default as they should be."""

    def one(params: Any, state: Any) -> Any:
        g = gradients(state, params)[1] if grads is None else grads(params, state)
        updates, _ = tx.update(g, state, params, **kwargs)
        return optax.apply_updates(params, updates)

    return (jax.jit(one) if jit else one)(params, tx.init(params))


def initial(policy: Any, **rules: Any) -> Any:
    """A governed model's parameters."""
    return jmpp.wrap(Model(), jmpp.PolicyMap(policy, rules) if rules else policy).init(jax.random.key(0), X)


def state_of(apply_fn: Any = NET.apply, tx: Any = SGD, **kwargs: Any) -> Any:
    params = NET.init(jax.random.key(0), X)["params"]
    return jmpp.linen.TrainState.create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)


def nnx_step(grad: Any, **kwargs: Any) -> Any:
    model = jmpp.wrap(Unnamed(), "mixed_float16")
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    return grad(lambda m: m(X).sum(), **kwargs)(optimizer, model)


def half_loss(params: Any) -> Any:
    return jnp.sum(params["w"].astype(jnp.float16) ** 2)


#: Name -> what is done, and words that lead to the repair.
POLICIES: dict[str, tuple[Callable[[], Any], str]] = {
    "autocast as a context": (lambda: jmpp.autocast("float16"), r"with jmp_policy\.region"),
    "autocast of nothing": (lambda: jmpp.autocast(), r"autocast\(function|fn"),
    "a model to autocast": (lambda: jmpp.autocast(NET, "fp16"), r"module\.apply"),
    "an NNX model to autocast": (
        lambda: jmpp.autocast(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "fp16"),
        r"jmp_policy\.nnx\.autocast",
    ),
    "autocast's dtype is misspelt": (lambda: jmpp.autocast(square, "flaot16"), "float16"),
    "a dtype of 8 bits to autocast": (lambda: jmpp.autocast(square, "float8_e4m3fn"), "recipe|fp8_current"),
    "autocast's device_type": (lambda: jmpp.autocast("cuda", dtype="float16"), "function"),
    "a call in autocast": (lambda: jmpp.autocast(square(PARAMS), "fp16"), "function"),
    "cache_enabled": (lambda: jmpp.autocast(square, "fp16", cache_enabled=True), "cache_enabled"),
    "a model of another library": (lambda: jmpp.wrap(Equinox(), "fp16"), r"jmp_policy\.autocast\(fn"),
    "a function to wrap": (lambda: jmpp.wrap(lambda x: x, "fp16"), r"jmp_policy\.autocast\(fn"),
    "a method to wrap": (lambda: jmpp.wrap(NET.apply, "fp16"), "Wrap the module"),
    "a class to wrap": (lambda: jmpp.wrap(nn.Dense, "fp16"), "instance"),
    "a TrainState to wrap": (
        lambda: jmpp.wrap(state_of(precision="no"), "fp16"),
        "takes an instance of flax",
    ),
    "parameters to wrap": (lambda: jmpp.wrap(PARAMS, "fp16"), "takes an instance of flax"),
    "an optimizer to wrap": (lambda: jmpp.wrap(optax.adam(0.1), "fp16"), "loss_scaled"),
    "a dtype to wrap": (lambda: jmpp.wrap(NET, jnp.float16), "Write 'mixed_float16'"),
    "wrap without a policy": (lambda: jmpp.wrap(NET), "policy"),
    "the arguments of wrap turned round": (lambda: jmpp.wrap("mixed_float16", NET), "wrap.*(first|module)"),
    "a config to wrap": (lambda: jmpp.wrap(NET, {"policy": "fp16"}), "from_config"),
    "wrapped twice": (lambda: jmpp.wrap(jmpp.wrap(NET, "mixed_float16"), "mixed_bfloat16"), "already|once"),
    "a policy is misspelt": (lambda: jmpp.wrap(NET, "mixed_flaot16"), "Did you mean 'mixed_float16'"),
    "float8 as a dtype": (lambda: jmpp.Policy("p=f32,c=f8,o=f32"), "recipe"),
    "an integer dtype": (lambda: jmpp.Policy("p=f32,c=int8,o=f32"), "float"),
    "a key is misspelt": (lambda: jmpp.Policy("params=f32,comptue=f16,output=f32"), "compute"),
    "two policies in a tuple": (lambda: jmpp.wrap(NET, ("float32", "float16")), "PolicyMap|policy"),
    "apex's O2": (lambda: jmpp.wrap(NET, "O2"), "mixed_float16"),
    "a tensor of torch": (lambda: gradients(TX.init(PARAMS), {"w": Torch()}), r"jnp\.asarray"),
    "a rule for no module": (lambda: initial("mixed_float16", heads="float32"), "'head'"),
    "a rule with a parameter's path": (
        lambda: jmpp.wrap(Model(), jmpp.PolicyMap("mixed_float16", {"head/kernel": "float32"})).init(
            jax.random.key(0), X
        ),
        "head",
    ),
    "a rule by a class's name": (
        lambda: initial("mixed_float16", Dense="float32"),
        r"class|nn\.Dense",
    ),
    "a rule that is no policy": (lambda: jmpp.PolicyMap("mixed_float16", {"head": 3}), "policy|'float32'"),
    "a pattern that is a number": (lambda: jmpp.PolicyMap("mixed_float16", {3: "float32"}), "path|pattern"),
    "rules without a default": (lambda: jmpp.PolicyMap({"head": "float32"}), "default|first"),
    "a half model to a master policy": (
        lambda: jmpp.wrap(nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), "mixed_bfloat16"),
        "cast_params",
    ),
    "region's dtype is misspelt": (lambda: jmpp.region("flaot16").__enter__(), "float16"),
    "from_config's True": (lambda: jmpp.from_config(True), "YAML.*'fp16'"),
    "accelerate's key": (lambda: jmpp.from_config({"mixed_precision": "fp16"}), "Did you mean 'policy'"),
    "a key of a config": (lambda: jmpp.from_config({"polcy": "fp16"}), "Did you mean 'policy'"),
    "DeepSpeed's section": (
        lambda: jmpp.from_config({"fp16": {"enabled": True, "loss_scale": 0}}),
        "policy",
    ),
    "an unknown loss scale": (
        lambda: jmpp.from_config({"policy": "fp16", "loss_scale": {"type": "dynamik"}}),
        "dynamic",
    ),
    "growth in a config": (
        lambda: jmpp.from_config({"policy": "fp16", "loss_scale": {"type": "dynamic", "growth": 5}}),
        "growth_interval",
    ),
    "a config that is a path": (lambda: jmpp.from_config("config.yaml"), "load|mapping|mixed_float16|fp16"),
    "Lightning's word is misspelt": (lambda: jmpp.from_config("16-mixd"), "16-mixed"),
}
SCALES: dict[str, tuple[Callable[[], Any], str]] = {
    "torch's init_scale": (lambda: jmpp.DynamicLossScale(init_scale=8.0), "Did you mean 'loss_scale'"),
    "torch's backoff": (lambda: jmpp.DynamicLossScale(backoff=0.5), "Did you mean 'backoff_factor'"),
    "torch's enabled": (lambda: jmpp.DynamicLossScale(enabled=False), "NoOpLossScale|takes loss_scale"),
    "jmp's period": (lambda: jmpp.DynamicLossScale(period=8), "Did you mean 'growth_interval'"),
    "jmp's factor": (lambda: jmpp.DynamicLossScale(factor=2), "Did you mean 'growth_factor'"),
    "apex's scale_factor": (lambda: jmpp.DynamicLossScale(scale_factor=2), "Did you mean 'growth_factor'"),
    "apex's scale_window": (
        lambda: jmpp.DynamicLossScale(scale_window=2),
        "Did you mean 'growth_interval'",
    ),
    "Keras's dynamic_growth_steps": (
        lambda: jmpp.DynamicLossScale(dynamic_growth_steps=2),
        "Did you mean 'growth_interval'",
    ),
    "DeepSpeed's loss_scale_window": (
        lambda: jmpp.DynamicLossScale(loss_scale_window=2),
        "Did you mean 'growth_interval'",
    ),
    "DeepSpeed's initial_scale_power": (
        lambda: jmpp.DynamicLossScale(initial_scale_power=16),
        "loss_scale",
    ),
    "Keras's initial_scale": (lambda: jmpp.StaticLossScale(initial_scale=8.0), "Did you mean 'loss_scale'"),
    "a scale's argument in a config": (
        lambda: jmpp.from_config({"policy": "fp16", "loss_scale": {"growth_intervall": 500}}),
        "Did you mean 'growth_interval'",
    ),
    "gradients in place of whether they are finite": (
        lambda: SCALE.adjust({"w": jnp.array([jnp.nan])}),
        r"a boolean scalar such as all_finite\(grads\)",
    ),
    "NaN for whether gradients are finite": (lambda: jmpp.PIDLossScale().adjust(jnp.nan), "a boolean scalar"),
    "parameters before the loss": (lambda: jmpp.sensitivity(PARAMS, square), "Give the function first"),
    "parameters before the function": (lambda: jmpp.diagnose(PARAMS, square), "Give the function first"),
    "a float32 dtype for a policy": (lambda: jmpp.get_policy(jnp.float32), "Write 'float32'"),
    "no skips allowed": (lambda: jmpp.check(TX.init(PARAMS), max_consecutive_skips=0), "between 1 and"),
    "a word that is none": (lambda: jmpp.DynamicLossScale(colour=8.0), "takes loss_scale, growth_interval"),
    "a scale of 0": (lambda: jmpp.DynamicLossScale(0.0), "between min_loss_scale and"),
    "a scale that is negative": (lambda: jmpp.StaticLossScale(-8.0), "between min_loss_scale and"),
    "a scale that is NaN": (lambda: jmpp.StaticLossScale(float("nan")), "finite"),
    "a growth factor of 1": (lambda: jmpp.DynamicLossScale(growth_factor=1.0), "greater|above|> 1"),
    "a backoff factor of 2": (lambda: jmpp.DynamicLossScale(backoff_factor=2.0), "below|between|< 1|less"),
    "a growth interval of 0": (lambda: jmpp.DynamicLossScale(growth_interval=0), "between 1 and"),
    "a text as scale": (lambda: jmpp.DynamicLossScale("dynamic"), "number|from_config"),
    "bounds turned round": (
        lambda: jmpp.DynamicLossScale(min_loss_scale=8.0, max_loss_scale=2.0),
        "min_loss_scale.*max_loss_scale|max_loss_scale.*min_loss_scale",
    ),
    "a class as loss scale": (lambda: jmpp.loss_scaled(SGD, jmpp.DynamicLossScale), r"DynamicLossScale\(\)"),
    "a number as loss scale": (lambda: jmpp.loss_scaled(SGD, 1024.0), r"StaticLossScale\(1024.0\)"),
    "a text as loss scale": (lambda: jmpp.loss_scaled(SGD, "dynamic"), r"DynamicLossScale\(\)"),
    "the arguments turned round": (lambda: jmpp.loss_scaled(SCALE, SGD), "first|loss_scaled\\(optimizer"),
    "no loss scale": (lambda: jmpp.loss_scaled(SGD), "loss_scale"),
    "a learning rate as optimizer": (lambda: jmpp.loss_scaled(0.1, SCALE), "optax|transformation"),
    "a class as optimizer": (lambda: jmpp.loss_scaled(optax.adam, SCALE), r"optax\.adam\(|call"),
    "an nnx.Optimizer as optimizer": (
        lambda: jmpp.loss_scaled(
            nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), SGD, wrt=nnx.Param), SCALE
        ),
        "optax|inside",
    ),
    "count_mode is misspelt": (lambda: jmpp.loss_scaled(SGD, SCALE, count_mode="holt"), "'hold'"),
    "torch's scaler": (lambda: jmpp.GradScaler, "loss_scaled.*scaled_value_and_grad"),
    "Keras's optimizer": (lambda: jmpp.LossScaleOptimizer, r"loss_scaled\("),
    "Flax's DynamicScale": (lambda: jmpp.DynamicScale, r"loss_scaled\("),
    "Keras's policy": (lambda: jmpp.set_global_policy, r"jmp_policy\.wrap"),
    "apex's initialize": (lambda: jmpp.initialize, r"jmp_policy\.wrap"),
    "mpx's filter_grad": (lambda: jmpp.filter_grad, "scaled_value_and_grad"),
    "Flax's state": (lambda: jmpp.TrainState, r"jmp_policy\.linen\.TrainState"),
}
STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "parameters first": (lambda: gradients(PARAMS), "first argument before the parameters"),
    "a number first": (lambda: gradients(8.0, PARAMS), "first argument before the parameters"),
    "the optimizer first": (lambda: gradients(TX, PARAMS), r"init\(params\)|first argument"),
    "all arguments in the first call": (
        lambda: jmpp.scaled_value_and_grad(square, TX.init(PARAMS), PARAMS),
        r"scaled_value_and_grad\(loss_fn\)\(opt_state, params\)",
    ),
    "an NNX model before its optimizer": (
        lambda: nnx_step(lambda f: lambda o, m: jmpp.nnx.scaled_value_and_grad(f)(m, o)),
        r"\(optimizer, model, \.\.\.\)",
    ),
    "a state without a scale": (lambda: gradients(SGD.init(PARAMS), PARAMS), "loss_scaled"),
    "the state forgotten": (lambda: gradients(TX.init(PARAMS)), "params|parameters"),
    "parameters and state turned round": (lambda: gradients(PARAMS, TX.init(PARAMS)), "first argument"),
    "two loss scales": (
        lambda: gradients(jmpp.loss_scaled(TX, SCALE).init(PARAMS), PARAMS),
        "twice.*Remove one",
    ),
    "a loss that is no scalar": (
        lambda: gradients(TX.init(PARAMS), PARAMS, loss=lambda p: p["w"]),
        r"scalar|mean\(\)",
    ),
    "a loss and more without has_aux": (
        lambda: gradients(TX.init(PARAMS), PARAMS, loss=lambda p: (square(p), p)),
        "has_aux=True",
    ),
    "has_aux without more": (
        lambda: gradients(TX.init(PARAMS), PARAMS, has_aux=True),
        "has_aux",
    ),
    "a loss that is None": (lambda: gradients(TX.init(PARAMS), PARAMS, loss=lambda p: None), "return"),
    "a loss of integers": (lambda: gradients(TX.init(PARAMS), PARAMS, loss=lambda p: 3), "float|real"),
    "a call in place of a function": (
        lambda: jmpp.scaled_value_and_grad(square(PARAMS)),
        "function",
    ),
    "parameters that are integers": (
        lambda: gradients(TX.init({"w": jnp.ones(2, int)}), {"w": jnp.ones(2, int)}),
        "allow_int|float",
    ),
    "the scale forgotten": (
        lambda: step(TX, grads=lambda p, s: jax.grad(square)(p)),
        "scaled_value_and_grad",
    ),
    "clipped outside": (
        lambda: step(optax.chain(optax.clip_by_global_norm(1.0), jmpp.loss_scaled(SGD, SCALE))),
        r"inside: loss_scaled\(optax\.chain",
    ),
    "a scale of one's own": (
        lambda: step(TX, grads=lambda p, s: jax.grad(lambda p: 65536.0 * square(p))(p)),
        "scaled_value_and_grad",
    ),
    "unscaled by hand as well": (
        lambda: step(
            TX,
            grads=lambda p, s: jax.tree.map(lambda g: g / s.loss_scale.loss_scale, gradients(s, p)[1]),
        ),
        "divide|unscale",
    ),
    "MultiSteps outside": (
        lambda: step(optax.MultiSteps(TX, 2).gradient_transformation()),
        r"loss_scaled\(optax\.MultiSteps",
    ),
    "apply_if_finite outside": (
        lambda: step(optax.apply_if_finite(TX, 5)),
        "inside|apply_if_finite",
    ),
    "momentum behind in a chain": (
        lambda: step(optax.chain(TX, optax.trace(0.9))),
        r"loss_scaled\(optax\.chain",
    ),
    "gradients of other parameters": (
        lambda: step(TX, grads=lambda p, s: {"v": gradients(s, p)[1]["w"]}),
        "structure|tree",
    ),
    "value and gradients": (
        lambda: step(TX, grads=lambda p, s: gradients(s, p)),
        r"loss, grads = scaled_value_and_grad",
    ),
    "a state of another optimizer": (
        lambda: TX.update(PARAMS, SGD.init(PARAMS), PARAMS),
        "pass the state that its own init returned",
    ),
    "parameters as state": (
        lambda: TX.update(PARAMS, PARAMS, PARAMS),
        "pass the state that its own init returned",
    ),
    "update without params": (
        lambda: jax.jit(lambda p, s: jmpp.loss_scaled(optax.adamw(0.1), SCALE).update(gradients(s, p)[1], s))(
            PARAMS, jmpp.loss_scaled(optax.adamw(0.1), SCALE).init(PARAMS)
        ),
        "params",
    ),
    "axis_name without an axis": (
        lambda: jmpp.all_finite(jnp.ones(2), axis_name="batch"),
        "names no mapped axis.*leave it out",
    ),
    "axis_name of an update": (
        lambda: step(jmpp.loss_scaled(SGD, SCALE, axis_name="i")),
        "names no mapped axis",
    ),
    "a loss that has no name": (
        lambda: gradients(jmpp.loss_scaled(SGD, {"a": SCALE, "b": SCALE}).init(PARAMS), PARAMS),
        "loss='a'",
    ),
    "an unknown loss": (
        lambda: jmpp.scaled_value_and_grad(square, loss="c")(
            jmpp.loss_scaled(SGD, {"a": SCALE}).init(PARAMS), PARAMS
        ),
        "'a'",
    ),
    "check inside jit": (lambda: jax.jit(lambda s: jmpp.check(s))(TX.init(PARAMS)), "metrics|outside"),
    "metrics of another state": (lambda: jmpp.metrics(SGD.init(PARAMS)), "loss_scaled"),
    "an NNX model to the core": (lambda: nnx_step(jmpp.scaled_value_and_grad), r"jmp_policy\.nnx\.scaled"),
    "a Linen model to nnx": (
        lambda: jmpp.nnx.scaled_value_and_grad(lambda m: 0.0)(TX.init(PARAMS), NET),
        r"jmp_policy\.scaled_value_and_grad|nnx",
    ),
    "an optimizer without a scale in NNX": (
        lambda: jmpp.nnx.scaled_value_and_grad(lambda m: m(X).sum())(
            nnx.Optimizer(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), SGD, wrt=nnx.Param),
            nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
        ),
        "loss_scaled",
    ),
    "a model in place of its apply": (lambda: state_of(NET, precision="bf16"), r"apply_fn=model\.apply"),
    "a wrapped apply and precision=": (
        lambda: state_of(jmpp.wrap(NET, "mixed_float16").apply, precision="bf16"),
        "drop|already|without precision",
    ),
    "a loss scale in the optimizer and in precision=": (
        lambda: state_of(tx=TX, precision="fp16"),
        "twice|already|bare|itself",
    ),
    "a precision that is none": (lambda: state_of(precision="fp17"), "'fp16'"),
    "another model's checkpoint": (
        lambda: jmpp.restore_state(TX.init(PARAMS), {"w": np.ones(3)}),
        r"LossScaledState|loss_scaled|loss_scale",
    ),
    "masters of float32 parameters' gradients": (
        lambda: jmpp.master_weights(0.1),
        "optax|transformation",
    ),
    "accumulation of 0 micro-batches": (lambda: jmpp.accumulate_gradients(square, 0), "between 1 and"),
    "accumulation that does not divide": (
        lambda: jmpp.accumulate_gradients(lambda p, x: jnp.mean(p["w"] * x), 3)(
            SCALE, PARAMS, jnp.ones((4, 2))
        ),
        "divisible|equal|multiple",
    ),
    "accumulation without a batch": (
        lambda: jmpp.accumulate_gradients(square, 2)(SCALE, PARAMS),
        "batch.*argument|arguments",
    ),
    "moments of a dtype that is none": (lambda: jmpp.half_moments(SGD, mu="f12"), "bfloat16"),
}
REPORTS: dict[str, tuple[Callable[[], Any], str]] = {
    "audit of a call": (lambda: jmpp.audit(square(PARAMS)), "call it already"),
    "audit of a model": (lambda: jmpp.audit(NET, X), r"\.apply"),
    "audit without arguments": (lambda: jmpp.audit(square), "arguments|params"),
    "drift of a call": (lambda: jmpp.drift(square(PARAMS), PARAMS), "function"),
    "diagnose of a call": (lambda: jmpp.diagnose(square(PARAMS)), "argument: 'params'"),
    "summary without inputs": (lambda: jmpp.summary(NET, "mixed_float16"), "input"),
    "summary's arguments turned round": (lambda: jmpp.summary("mixed_float16", NET, X), "module|model"),
    "a card that is none": (
        lambda: jmpp.memory_report(square, PARAMS, target="H1000"),
        "'H100'",
    ),
    "a small letter in a card": (lambda: jmpp.lowering_report(square, PARAMS, target="h10"), "H100"),
    "a recipe that is none": (lambda: jmpp.Policy("mixed_bfloat16, r=fp8_curent"), "fp8_current"),
    "recommend without parameters": (lambda: jmpp.recommend(square), "params|arguments"),
    "recommend of a model without its other variables": (
        lambda: jmpp.recommend(NET, NET.init(jax.random.key(0), X)["params"], X),
        r"\{'params': params\}",
    ),
    "recommend of a wrapped model": (
        lambda: jmpp.recommend(
            lambda p, x: jmpp.wrap(NET, "mixed_float16").apply(p, x).sum(), NET.init(jax.random.key(0), X), X
        ),
        "bare|wrapped|float32 model|without",
    ),
    "recommend's dtype is misspelt": (
        lambda: jmpp.recommend(square, PARAMS, dtype="flaot16"),
        "float16",
    ),
    "a budget of percents": (lambda: jmpp.recommend(square, PARAMS, budget=2), "0.01 for 1 %"),
    "a budget as text": (lambda: jmpp.recommend(square, PARAMS, budget="2%"), "0.01 for 1 %"),
    "the half dtype of a card's name": (lambda: jmpp.best_half_dtype("H100"), r"jax\.devices"),
    "a spectrum of a call": (lambda: jmpp.gradient_spectrum(square(PARAMS), PARAMS), "function"),
    "check with a loss and nothing to call it with": (
        lambda: jmpp.check(TX.init(PARAMS), loss_fn=square),
        r"args=\(params, batch\)",
    ),
}
MISTAKES = POLICIES | SCALES | STEPS | REPORTS


#: What Python says of a call of this library.
_CALL = re.compile(rf"TypeError: ({'|'.join(dir(jmpp))})\(\) (missing|got)")


def answer(mistake: Callable[[], Any]) -> tuple[str, bool]:
    """What is said, by an error or by warnings, and whether this library says it; "" for silence.

    What Python says of arguments that are missing in a call of this library counts as said by it.
    """
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")  # The last frame is the one that raises.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mistake()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            said = f"{type(error).__name__}: {error}"
            return said, last.startswith(LIBRARY) or bool(_CALL.match(said))
        finally:
            jax.config.update("jax_traceback_filtering", filtering)
    said = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return " ".join(said), bool(said)


def grade(name: str) -> tuple[int, str]:
    """The grade of a mistake's answer, and the answer."""
    mistake, repair = MISTAKES[name]
    said, is_ours = answer(mistake)
    if not said:
        return 0, said
    return (3 if re.search(f"(?s){repair}", said) else 2) if is_ours else 1, said
