"""Keeps the state of the recipe "fp8_delayed" in variables of Linen modules, as Flax's float8 layers do."""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from jmp_policy._src.products.fp8.delayed import STATE, delayed_product
from jmp_policy._src.products.fp8.functions import Float8DotGeneral


class DelayedDotGeneral(Float8DotGeneral):
    """Function that stands in for `lax.dot_general` in a Linen layer, which gets the state as a submodule."""

    def product(self, operands: Sequence[Any], params: dict[str, Any], unmarked: Sequence[Any]) -> Any:
        """Computes a float8 product, and makes its state where there is none."""
        # Under the name that Flax gives its own module, so that checkpoints of either fit.
        return _Delayed(name=f"{nn.Fp8DirectDotGeneralOp.__name__}_0")(operands, params, unmarked)


class _Delayed(nn.Fp8DirectDotGeneralOp):
    """Flax's module, whose variables it makes, with a product of ours."""

    def __call__(self, operands: Sequence[Any], params: dict[str, Any], unmarked: Sequence[Any]) -> Any:
        state = {name: getattr(self, name).value for name in STATE}
        return delayed_product(operands, params, state, unmarked)
