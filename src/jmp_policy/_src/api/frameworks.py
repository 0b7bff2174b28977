"""Which module frameworks there are, and where their implementations lie."""

from jmp_policy._src.policy.frameworks import Framework, register_framework


def _linen() -> Framework:
    from jmp_policy._src.flax.linen.framework import LinenFramework

    return LinenFramework()


def _nnx() -> Framework:
    from jmp_policy._src.flax.nnx.framework import NNXFramework

    return NNXFramework()


def register_frameworks() -> None:
    """Registers Linen and NNX; neither is imported before one of its modules is met."""
    register_framework("flax.linen", "Module", _linen)
    register_framework("flax.nnx", "Module", _nnx)
