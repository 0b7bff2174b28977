"""Defines what layers call in place of `lax.dot_general` under a float8 recipe."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.ir import evaluate
from jmp_policy._src.jaxpr.matrix_products import size_of
from jmp_policy._src.policy.worthwhile import staying, without_target
from jmp_policy._src.products import functions
from jmp_policy._src.products.fp8.eligibility import loses, stays_because
from jmp_policy._src.products.fp8.primitive import bind_float8


@dataclasses.dataclass(frozen=True)
class Float8DotGeneral:
    """Function that stands in for `lax.dot_general`: a float8 product, where that suits the operands.

    Args:
      recipe: name of a recipe, and of the device on which it must gain.
      is_asked_for: whether a rule names the layer, so that only what the hardware refuses stays.
      instead_of: what the layer had: a function, or None for the default.
      key: gives the data of a key for rounding gradients at random, or None; None for `rounding_key`'s.
    """

    recipe: str
    is_asked_for: bool = False
    instead_of: Any = dataclasses.field(default=None, compare=False, repr=False)
    key: Callable[[], Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __call__(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the product of two arrays; the arguments are those of `lax.dot_general`."""
        if any(not is_half(getattr(x, "dtype", None)) for x in (lhs, rhs)):
            return functions.dot_general(lhs, rhs, *args, **kwargs)
        jaxpr = jax.make_jaxpr(lambda lhs, rhs: lax.dot_general(lhs, rhs, *args, **kwargs))(
            jax.typeof(lhs), jax.typeof(rhs)
        )

        def step(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            # Inside shard_map an operand may be marked as varying first.
            if eqn.primitive.name != "dot_general":
                return compat.bind_primitive(eqn.primitive, operands, eqn.params)
            if stays_because(eqn, self.recipe, self.is_asked_for):
                return [functions.dot_general(*operands, **eqn.params)]
            size = size_of(eqn)
            if loses(size, self.recipe):
                with staying(self.recipe, size):
                    return [functions.dot_general(*operands, **eqn.params)]
            return [self.product(operands, eqn.params, (lhs, rhs))]

        return evaluate(jaxpr, (lhs, rhs), step)[0]

    def product(self, operands: Sequence[Any], params: dict[str, Any], unmarked: Sequence[Any]) -> Any:
        """Computes a float8 product; the arguments are those of `bind_float8`."""
        scales = (None, None, self.key and self.key())
        return bind_float8(operands, without_target(self.recipe), params, scales=scales, unmarked=unmarked)
