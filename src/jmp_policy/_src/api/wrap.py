"""Puts Flax modules of either kind under a policy, and imports that kind's implementation when needed."""

import functools
import importlib
from typing import Any, TypeVar

from jmp_policy._src.core.classes import is_instance_of
from jmp_policy._src.policy.frameworks import FRAMEWORKS, Framework, framework_of
from jmp_policy._src.policy.rules import PolicyMapLike

T = TypeVar("T")

#: The public module of each framework, by the name of the framework's package.
_PUBLIC: dict[str, str] = {}


def wrap(module: T, policy: PolicyMapLike, **keywords: Any) -> T:
    """Puts a Flax module under a precision policy.

    Args:
      module: an instance of `flax.linen.Module` or `flax.nnx.Module`. It is not changed.
      policy: `"mixed_float16"`, `"fp16"` or another policy's text, a `Policy`, a `PolicyMap` with a policy
        per module, or a `Precision`, whose rules count.
      **keywords: what the wrap of the module's framework takes besides: `methods=` of `jmp_policy.nnx.wrap`.

    Returns:
      A module of the same kind, with the same variables and checkpoints. Parameters stay in param dtype and
      are cast to compute dtype where they are used, inputs where a product of at least 8 terms reads them
      (`keep_small_inputs` of a `PolicyMap`), and outputs to output dtype where they leave the governed part
      of the model. An NNX module shares its Variables with the original.

    Raises:
      TypeError, ValueError: for what is no module or policy; for a module that is wrapped already, under
        another one; for rules that match no module (Linen: at the first `init` or `apply`), and for NNX
        parameters that are not in param dtype.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> model = wrap(nn.Dense(2), "mixed_bfloat16")
      >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> model.apply(variables, jnp.ones((1, 3))).dtype
      dtype('float32')
    """
    for framework, public in _PUBLIC.items():
        if is_instance_of(module, framework, "Module"):
            return importlib.import_module(public).wrap(module, policy, **keywords)
    given = f"the class {module.__name__}" if isinstance(module, type) else f"{type(module).__name__}"
    hint = " Make an instance of it first."
    if not isinstance(module, type):
        hint = " For functions, and models of Haiku or Equinox, there is jmp_policy.autocast(fn, 'bfloat16')."
    if framework_of(policy) is not None:
        hint = " The module comes first: wrap(module, policy)."
    elif hasattr(module, "init") and hasattr(module, "update"):
        hint = " Optimizers are wrapped by jmp_policy.loss_scaled(optimizer, DynamicLossScale())."
    if framework_of(getattr(module, "__self__", None)) is not None:
        hint = " Wrap the module whose function it is."
    raise TypeError(f"wrap takes an instance of flax.linen.Module or flax.nnx.Module, got {given}.{hint}")


def register_frameworks(linen: str, nnx: str) -> None:
    """Registers Linen and NNX, whose implementations are imported when one of their modules is first seen.

    Args:
      linen, nnx: names of the public module of each. It gives the classes and functions of its framework the
        names that pickles show, so that it is imported along with the implementation.
    """
    for kind, public in (("linen", linen), ("nnx", nnx)):
        _PUBLIC[f"flax.{kind}"] = public
        FRAMEWORKS[f"flax.{kind}"] = functools.cache(functools.partial(_load, kind, public))


def _load(kind: str, public: str) -> Framework:
    importlib.import_module(public)
    return importlib.import_module(f"jmp_policy._src.flax.{kind}.framework").FRAMEWORK
