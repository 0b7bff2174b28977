"""Registers the module frameworks: Flax Linen and Flax NNX."""

from collections.abc import Callable

from jmp_policy._src.policy.frameworks import Framework, register_framework


def register_frameworks(linen: Callable[[], object], nnx: Callable[[], object]) -> None:
    """Registers Linen and NNX, whose implementations are imported when one of their modules is first seen.

    Args:
      linen, nnx: import the public module of each. It gives the classes and functions of its framework the
        names that pickles show, so that it is imported along with the implementation.
    """

    def load_linen() -> Framework:
        from jmp_policy._src.flax.linen.framework import LinenFramework

        linen()
        return LinenFramework()

    def load_nnx() -> Framework:
        from jmp_policy._src.flax.nnx.wrap_module import NNXFramework

        nnx()
        return NNXFramework()

    register_framework("flax.linen", "Module", load_linen)
    register_framework("flax.nnx", "Module", load_nnx)
