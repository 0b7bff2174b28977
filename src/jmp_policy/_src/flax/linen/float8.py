"""Products of Linen layers under a float8 recipe; one of them has state."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.errors
import flax.linen as nn

from jmp_policy._src.loss_scaling.float8_state import COLLECTION
from jmp_policy._src.policy.recipes import DELAYED, needs_key, passes_of
from jmp_policy._src.products.fp8.functions import STATE, Float8DotGeneral, delayed_product
from jmp_policy._src.products.fp8.nvfp4 import STREAM, as_key, data_of


def float8_product(module: nn.Module, recipe: str, is_asked_for: bool, instead_of: Any) -> Float8DotGeneral:
    """What a layer calls in place of `lax.dot_general`; other arguments as of `Float8DotGeneral`."""
    if needs_key(recipe):
        key = functools.partial(_key_of, module)
        return Float8DotGeneral(recipe, is_asked_for, instead_of, key)
    kind = DelayedDotGeneral if DELAYED in passes_of(recipe) else Float8DotGeneral
    return kind(recipe, is_asked_for, instead_of)


def _key_of(module: nn.Module) -> Any:
    """Data of a key for a product of a layer; None where its program gives it none."""
    return data_of(as_key(module.make_rng(STREAM))) if module.has_rng(STREAM) else None


class DelayedDotGeneral(Float8DotGeneral):
    """Float8 product of the recipe "fp8_delayed", whose state is in variables, as that of Flax's layers is.

    A Linen layer gets the state as a submodule.
    """

    def product(self, operands: Sequence[Any], params: dict[str, Any], unmarked: Sequence[Any]) -> Any:
        """Computes a float8 product, and makes its state where there is none."""
        # Under the name that Flax gives its own module, so that checkpoints of either fit.
        product = _Delayed(name=f"{nn.Fp8DirectDotGeneralOp.__name__}_0")
        try:
            return product(operands, params, unmarked)
        except (flax.errors.ScopeCollectionNotFound, flax.errors.ScopeVariableNotFoundError) as error:
            raise ValueError(
                f"{DELAYED} keeps the largest values of past steps in {COLLECTION!r}, and those of "
                f"{'/'.join(product.path[:-1])} are not given. Call init of the wrapped model, and "
                "restore_state(fresh_variables, variables) to go on with parameters; in nn.scan and nn.vmap "
                f"name the collection: variable_axes={{'params': 0, {COLLECTION!r}: 0}}."
            ) from error


class _Delayed(nn.Fp8DirectDotGeneralOp):
    """Flax's module, whose variables it makes, with a product of ours."""

    def __call__(self, operands: Sequence[Any], params: dict[str, Any], unmarked: Sequence[Any]) -> Any:
        state = {name: getattr(self, name).value for name in STATE}
        return delayed_product(operands, params, state, unmarked)
