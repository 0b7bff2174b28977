"""Reads one setting of a config as a policy and a loss scale."""

import contextlib
import copy
import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import optax

from jmp_policy._src.api.wrap import wrap
from jmp_policy._src.core.serialization import check_depth
from jmp_policy._src.core.settings import shown
from jmp_policy._src.core.suggest import check_keys, did_you_mean
from jmp_policy._src.loss_scaling import scale_types
from jmp_policy._src.loss_scaling.loss_scale import DynamicLossScale, LossScale
from jmp_policy._src.loss_scaling.loss_scaled import loss_scaled
from jmp_policy._src.loss_scaling.loss_scales import check_losses
from jmp_policy._src.loss_scaling.metrics import get_loss_scale_state
from jmp_policy._src.loss_scaling.protocol import SPELLINGS
from jmp_policy._src.loss_scaling.state import Transformation
from jmp_policy._src.policy.policy import POLICY_KEYS, Policy
from jmp_policy._src.policy.rules import (
    FLAGS,
    PolicyMap,
    PolicyMapLike,
    as_policy_map,
    get_policy,
    policies_of,
)

T = TypeVar("T")

_KEYS = ("policy", "rules", *FLAGS, "loss_scale")
#: What other libraries' configs call them.
_SPELLINGS = {
    **dict.fromkeys(("mixed_precision", "precision", "dtype", "precision_policy"), "policy"),
    **dict.fromkeys(("loss_scaling", "scaler", "grad_scaler", "scale"), "loss_scale"),
}


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class Precision:
    """A policy and a loss scale: all that a config says about precision.

    Args:
      policy: a `PolicyMap`, or a policy or its text for one without rules.
      loss_scale: "auto": dynamic where the policy or a rule computes in float16, else none. "dynamic",
        "none", a number for a static scale, the dict of a loss scale
        (`{"type": "dynamic", "growth_interval": 500}`), a `LossScale`, or a mapping from the names of several
        losses to one of these each.

    Raises:
      TypeError, ValueError: for something that is not a policy or a loss scale.

    Example:
      >>> precision = Precision("mixed_float16", loss_scale=1024)
      >>> precision.to_dict()["loss_scale"]
      {'type': 'static', 'loss_scale': 1024.0}
      >>> from_config(precision.to_dict()) == precision
      True
    """

    policy: PolicyMap

    def __init__(self, policy: PolicyMapLike = "float32", loss_scale: Any = "auto"):
        object.__setattr__(self, "policy", as_policy_map(policy))
        if _is_word(loss_scale, "auto"):
            is_float16 = any(p.compute_dtype == np.float16 for p in policies_of(self.policy))
            loss_scale = "dynamic" if is_float16 else "none"
        _loss_scale(loss_scale)  # Raises for what is none.
        # A copy: whoever made the mapping may go on to change it.
        object.__setattr__(self, "_loss_scale_setting", copy.deepcopy(loss_scale))

    @property
    def loss_scale(self) -> Any:
        """A new loss scale, or a dict of them by the name of the loss."""
        return _loss_scale(self._loss_scale_setting)()  # type: ignore[attr-defined]

    def wrap(self, module: T) -> T:
        """A Flax module that computes under the policy; as `jmp_policy.wrap`."""
        return wrap(module, self.policy)

    def loss_scaled(self, inner: Transformation, **options: Any) -> optax.GradientTransformationExtraArgs:
        """Makes an optimizer take scaled gradients and skip steps; as `jmp_policy.loss_scaled`."""
        return loss_scaled(inner, self.loss_scale, **options)

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict of texts, numbers and lists, which `from_config` reads.

        Raises:
          TypeError, ValueError: for a loss scale or pattern of the user's own that has no name.
        """
        scale, to_dict = self.loss_scale, scale_types.loss_scale_to_dict
        settings = {n: to_dict(s) for n, s in scale.items()} if isinstance(scale, dict) else to_dict(scale)
        return {**self.policy.to_dict(), "loss_scale": settings}

    def __repr__(self) -> str:
        return f"Precision({self.policy!r}, loss_scale={self.loss_scale!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Precision) or self.policy != other.policy:
            return False
        return repr(self.loss_scale) == repr(other.loss_scale)

    def __hash__(self) -> int:
        return hash(self.policy)


def from_config(settings: Any) -> Precision:
    """Reads a setting of a config as a policy and a loss scale.

    Args:
      settings: one of

        - a word: `"fp16"`, `"bf16"`, `"no"` (accelerate), `"16-mixed"`, `"bf16-mixed"`, `"32-true"`
          (Lightning), `"auto"`: the half type that suits the default backend. `"fp16"` and `"bf16"` mean
          mixed precision, with float32 parameters; `"float16"` and `"bfloat16"` all of that type, as in
          `get_policy`;
        - the text of a policy, such as `"mixed_float16"` or `"p=f32, c=bf16, o=f32"`;
        - a mapping with `policy` (any of the above), and optionally `rules` (pairs of pattern and policy, or
          a mapping), `loss_scale` (as for `Precision`), and the flags of a `PolicyMap`; a dict, a
          `ml_collections.ConfigDict`, an OmegaConf `DictConfig`. The text of a class is "module:name", such
          as "flax.linen:Dense". A ConfigDict sorts its keys: where the order of rules matters, write pairs;
        - a mapping with the dtypes of one policy: `{"params": "float32", "compute": "bfloat16"}`;
        - JSON of one of these; a policy, a `PolicyMap` or a `Precision`.

    Returns:
      One object with `policy`, `loss_scale`, `wrap` and `loss_scaled`.

    Raises:
      TypeError, ValueError: for a word, key, pattern or value that is not known, with those that are.

    Example:
      >>> precision = from_config({"policy": "fp16", "rules": [["**/head", "fp32"]]})
      >>> precision.policy
      PolicyMap('params=float32,compute=float16,output=float32', {'**/head': 'params=float32,compute=...'})
      >>> type(precision.loss_scale).__name__, type(from_config("bf16").loss_scale).__name__
      ('DynamicLossScale', 'NoOpLossScale')
    """
    if isinstance(settings, Precision):
        return settings
    if isinstance(settings, str) and settings.strip()[:1] in ("{", '"', "["):
        try:
            settings = json.loads(settings)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"The precision {shown(settings)} looks like JSON and is none: {error}."
            ) from error
    check_depth(settings, "The precision")
    if not hasattr(settings, "items"):
        return Precision(_policy(settings))
    settings = _plain(settings)
    if set(settings) & set(POLICY_KEYS) and not set(settings) & set(_KEYS):
        return Precision(Policy.from_dict(settings))
    check_keys(settings, _KEYS, "a precision", _SPELLINGS)
    loss_scale = settings.pop("loss_scale", "auto")
    policy = _policy(settings.pop("policy", "float32"))
    if not settings:
        return Precision(policy, loss_scale)
    rules: Any = settings.get("rules")
    rules = () if rules is None else list(rules.items()) if hasattr(rules, "items") else rules
    settings["rules"] = [_rule(pair) for pair in (rules if isinstance(rules, Sequence) else [rules])]
    return Precision(PolicyMap.from_dict({"policy": policy, **settings}), loss_scale)


def check_one_loss_scale(opt_state: Any) -> None:
    """Raises ValueError for the state of a transformation that was `loss_scaled` twice."""
    try:
        get_loss_scale_state(opt_state)
    except ValueError as error:
        raise ValueError(
            f"tx has a loss scale already ({error}) Give the transformation without loss_scaled: the "
            "precision brings the loss scale."
        ) from error


def _policy(value: Any) -> Policy | PolicyMap:
    """Reads a policy as `get_policy` does, or from a mapping, or what YAML makes of its words."""
    if isinstance(value, PolicyMap):
        return value
    if hasattr(value, "items"):
        return Policy.from_dict(_plain(value))
    if value is True:
        raise TypeError(
            "The precision is True, as YAML reads yes and on. Name it: 'fp16', 'bf16' or 'mixed_bfloat16'; "
            "false and no mean float32."
        )
    # YAML reads no, 16 and null as other things than texts.
    return get_policy(shown(value) if isinstance(value, int | None) else value)


def _rule(pair: Any) -> tuple[Any, Any]:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(
            "'rules' are pairs of pattern and policy, such as [['**/head', 'float32']], or a mapping from "
            f"pattern to policy; got {shown(pair)} in them."
        )
    pattern, policy = pair
    try:
        return pattern, _policy(policy)
    except (TypeError, ValueError) as error:
        raise type(error)(f"The rule for {shown(pattern)} has no policy: {error}") from error


def _loss_scale(setting: Any) -> Callable[[], Any]:
    """Checks the setting of one or several loss scales, and returns a function that makes them.

    Making one asks JAX for its devices, which must not happen before `jax.distributed.initialize`.
    """
    keys = set(_plain(setting)) if hasattr(setting, "items") else {"type"}
    known = ("type", *inspect.signature(DynamicLossScale).parameters)
    if keys & {*known, *SPELLINGS}:
        return _one_loss_scale(setting)
    for name in map(str, keys):
        # Nearer than any name of a loss: main_loss is like min_loss_scale by 0.7.
        if hint := did_you_mean(name.lower(), known, cutoff=0.85):
            raise ValueError(f"Unknown argument {name!r} of a loss scale.{hint}")
    several = {name: _one_loss_scale(one) for name, one in check_losses(_plain(setting)).items()}
    return lambda: {name: make() for name, make in several.items()}


def _one_loss_scale(setting: Any) -> Callable[[], Any]:
    if isinstance(setting, LossScale):
        return lambda: setting
    if hasattr(setting, "items"):
        return scale_types.loss_scale_from_dict(_plain(setting))
    if setting is False or _is_word(setting, "none", "no", "false"):
        return scale_types.NoOpLossScale
    if _is_word(setting, "dynamic"):
        return DynamicLossScale
    with contextlib.suppress(ValueError):  # YAML reads 1e4 as a text.
        setting = float(setting) if isinstance(setting, str) else setting
    if isinstance(setting, int | float) and not isinstance(setting, bool):
        return scale_types.loss_scale_from_dict({"type": "static", "loss_scale": setting})
    hint = did_you_mean(setting, ("auto", *scale_types.TYPES)) if isinstance(setting, str) else ""
    raise ValueError(
        f"Unknown loss scale {shown(setting)}.{hint} Known: 'auto', 'dynamic', 'none', a number for a static "
        f"scale, and {{'type': ..., ...}} with the type {', '.join(scale_types.TYPES)}."
    )


def _is_word(value: Any, *words: str) -> bool:
    return isinstance(value, str) and value.strip().lower() in words


def _plain(settings: Any) -> dict[str, Any]:
    """A mapping as a dict; a ConfigDict is none, but can be turned into one."""
    return dict(settings.items())
