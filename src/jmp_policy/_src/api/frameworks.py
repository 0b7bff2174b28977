"""Registers the module frameworks: Flax Linen and Flax NNX."""

from jmp_policy._src.policy.frameworks import Framework, register_framework


def _linen() -> Framework:
    from jmp_policy._src.flax.linen.framework import LinenFramework

    return LinenFramework()


def _nnx() -> Framework:
    from jmp_policy._src.flax.nnx.framework import NNXFramework

    return NNXFramework()


def register_frameworks() -> None:
    """Registers Linen and NNX, whose implementations are imported when one of their modules is first seen."""
    register_framework("flax.linen", "Module", _linen)
    register_framework("flax.nnx", "Module", _nnx)
