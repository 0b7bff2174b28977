"""Registers the module frameworks: Flax Linen and Flax NNX."""

import functools
from collections.abc import Callable

from jmp_policy._src.policy.frameworks import Framework, register_framework


def _linen(import_public: Callable[[str], object]) -> Framework:
    from jmp_policy._src.flax.linen.framework import LinenFramework

    import_public("jmp_policy.linen")
    return LinenFramework()


def _nnx(import_public: Callable[[str], object]) -> Framework:
    from jmp_policy._src.flax.nnx.framework import NNXFramework

    import_public("jmp_policy.nnx")
    return NNXFramework()


def register_frameworks(import_public: Callable[[str], object]) -> None:
    """Registers Linen and NNX, whose implementations are imported when one of their modules is first seen.

    Args:
      import_public: imports a public module by name. Those of a framework are imported along with its
        implementation, since they give its classes and functions the names that pickles show.
    """
    register_framework("flax.linen", "Module", functools.partial(_linen, import_public))
    register_framework("flax.nnx", "Module", functools.partial(_nnx, import_public))
