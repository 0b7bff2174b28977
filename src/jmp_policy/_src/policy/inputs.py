"""Casts the inputs of a module to compute dtype, but for small ones: scalars, vectors next to larger inputs.

A noise level or a time costs nothing in float32, and half precision spoils what is computed from it:

    def __call__(self, x, sigma):               # x: (batch, height, width, channels), sigma: (batch,)
        c_noise = jnp.log(sigma) / 4
        angles = 2e4 * c_noise[:, None]         # an error of 2**-9 in c_noise is one of 40 in the angle

A floating input is small if its rank is 1 or 0 and another input of the call has a higher rank. So the only
vector of a model that is mapped over its examples (`jax.vmap`) is cast, and so is what a layer is called with
alone. What is inside the outermost governed module is passed small inputs on, alone too (an embedding of
`c_noise`); there a float32 vector is taken for one, unless it comes with a half vector, as the state of a
recurrent cell does.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jmp_policy._src.core.cast import cast_leaf, is_floating_array, map_changed
from jmp_policy._src.core.dtypes import is_half, promote_dtype
from jmp_policy._src.policy.module_precision import ModulePrecision

#: The rank up to which inputs are small in the governed module that is running; None outside of all.
_RANK = jax.make_user_context(default_value=None)


@dataclasses.dataclass(frozen=True)
class SmallInputs:
    """Which inputs of one call stay as they came.

    Args:
      rank: floating inputs of up to this rank are small; -1 if none are.
      are_all: whether the call has no other floating inputs: small outputs are as exact, then.
    """

    rank: int
    are_all: bool

    def keeps(self, x: Any) -> bool:
        """Returns whether an input is small, and more exact than half precision."""
        return is_floating_array(x) and not is_half(x.dtype) and len(x.shape) <= self.rank

    def output_rank(self, precision: ModulePrecision) -> int:
        """Returns up to which rank outputs of the call keep their dtype; scalars always do."""
        return max(0, self.rank) if self.are_all and precision.keeps_small_inputs else 0


@contextlib.contextmanager
def entered(inputs: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[SmallInputs]:
    """Finds the small inputs of a call; calls of other modules in the with-block are inside of this one.

    Args:
      inputs: a pytree of what the call is given, as it came.
      is_leaf: as for `jax.tree.flatten`.
    """
    outer, arrays = _RANK.value, [x for x in jax.tree.leaves(inputs, is_leaf) if _is_number(x)]
    floating = [x for x in arrays if is_floating_array(x)]
    rank = min(1, max((len(x.shape) for x in arrays), default=0) - 1)
    if outer is not None:
        meets_half = any(is_half(x.dtype) and len(x.shape) for x in floating)
        rank = max(rank, min(outer, 0) if meets_half else outer)
    small = SmallInputs(rank, are_all=False)
    small = dataclasses.replace(small, are_all=bool(floating) and all(map(small.keeps, floating)))
    with _RANK(rank if outer is None else max(rank, outer)):
        yield small


def cast_inputs(
    tree: Any, precision: ModulePrecision, small: SmallInputs, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Casts floating inputs to compute dtype; small ones no lower than the dtype of float32 parameters."""
    dtype = precision.compute_dtype
    keeps = precision.keeps_small_inputs and is_half(dtype)
    widest = promote_dtype(precision.policy.param_dtype)

    def cast(x: Any) -> Any:
        if not (keeps and small.keeps(x)):
            return cast_leaf(x, dtype)
        return cast_leaf(x, widest) if x.dtype.itemsize > widest.itemsize else x

    return map_changed(cast, tree, is_leaf)


def _is_number(x: Any) -> bool:
    """Returns whether an input is an array of numbers: no boolean mask, and no key."""
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
    return is_floating_array(x) or (is_array and jax.dtypes.issubdtype(x.dtype, np.number))
