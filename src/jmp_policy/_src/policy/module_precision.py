"""What the rules decide for one module, and the casts that follow: of its inputs, and of its outputs.

Inputs are rounded where they are used. Flax's layers cast theirs by their `dtype`. A module hands on what it
is given, but for an input that may meet a parameter of the module's own in a product::

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, ids):             # x: (batch, 64), ids: (batch, 26), as float32
            w = self.param("w", init, (64, 128))
            table = self.param("table", init, (10_000, 16))
            rows = table[ids.astype(int)]       # ids came as they were: no axis of a parameter has 26
            return x @ w, rows                  # x came in half: `w` has an axis of 64

Small inputs stay float32 too: scalars, vectors next to larger inputs, masks (a number per position of another
input), and what has fewer than 8 features. They cost nothing in float32, and `sin(2e4 * t)` of a half `t` is
off by 40 radians. A module that is given nothing else, and whose parameters sum fewer than 8 numbers,
computes in float32. A vector alone is cast; inside of a call that was given larger inputs it stays, unless a
half vector comes with it (the state of a recurrent cell).

Outputs for code under the same policy are in compute dtype, but for small ones of small inputs, what a module
without parameters made of float32 inputs (spectrograms), sums down to a vector in float32 (log-likelihoods),
and what is passed on beside a larger output (paddings).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import numpy as np

from jmp_policy._src.core import dtypes
from jmp_policy._src.policy import carries
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import role_of


@dataclasses.dataclass(frozen=True)
class ModulePrecision:
    """Policy of one module, and whether the module is a float32 island.

    An island (a normalisation layer, a product of fewer than `LEAST_TERMS` terms) computes in float32, and
    takes and returns the compute dtype of its policy. A recipe is asked for where a rule with one names the
    module itself, by its path or a predicate.
    """

    policy: Policy
    island: bool
    keeps_small_inputs: bool = True
    recipe_is_asked_for: bool = False

    @functools.cached_property
    def compute_dtype(self) -> np.dtype:
        """The dtype in which the module passes values on."""
        return self.policy.compute_dtype

    @functools.cached_property
    def param_dtype(self) -> np.dtype:
        """The dtype in which parameters are stored."""
        return dtypes.promote_dtype(self.policy.param_dtype) if self.island else self.policy.param_dtype

    @functools.cached_property
    def used_param_dtype(self) -> np.dtype:
        """The dtype of parameters where they are used."""
        return self.param_dtype if self.island else self.policy.compute_dtype

    def as_island(self) -> "ModulePrecision":
        """The same policy, computed in float32."""
        return dataclasses.replace(self, island=True)

    def recipe_at(self, path: str, outputs: Any, last: frozenset[str]) -> str | None:
        """The recipe of a layer; None where its role leaves it out."""
        if self.policy.recipe is None or self.island:
            return None
        role = role_of(self.policy.recipe, path, outputs, last)
        return None if role and not self.recipe_is_asked_for else self.policy.recipe


#: The least number of terms of a product that gains from half precision: Tensor Cores multiply 8 by 8.
LEAST_TERMS = 8

#: The rank up to which inputs are small in the governed module that is running; None outside of all.
_RANK = jax.make_user_context(default_value=None)


#: The shapes of the parameters that a module itself has; None if it is about to make them.
Shapes: TypeAlias = tuple[tuple[int, ...], ...] | None


def shapes_of(params: Iterable[Any]) -> Shapes:
    """Those of some arrays."""
    return tuple(x.shape for x in params if hasattr(x, "shape"))


class GovernedCall:
    """One call of a module's method under a policy: casts what goes in and what comes out.

    Args:
      precision: what the rules mean for the module.
      own: shapes of its own parameters.
      args, kwargs: what the method is called with.
      is_leaf: as for `jax.tree.flatten`.

    Attributes:
      precision: the same, in float32 where all that the module is given, and sums, is small.
    """

    def __init__(
        self,
        precision: ModulePrecision,
        own: Shapes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_leaf: Callable[[Any], bool] | None = None,
    ):
        self._inputs, self._own, self._is_leaf = (args, kwargs), own, is_leaf
        outer, leaves = _RANK.value, jax.tree.leaves((args, kwargs), is_leaf)
        # No boolean masks, and no keys. A number is an input where there is nothing else.
        numbers = [x for x in leaves if isinstance(x, dtypes.ARRAYS) and dtypes.is_number(x.dtype)]
        numbers = numbers or [np.float32(0) for x in leaves if isinstance(x, float)]
        half_ranks = [len(x.shape) for x in numbers if dtypes.is_half(x.dtype)]
        wide = [x for x in numbers if dtypes.is_wide(x.dtype)]
        # Up to which rank a float32 output is a sum or a mean over an axis, such as a likelihood.
        self._reduced = min(1, max((len(x.shape) for x in numbers), default=0) - 1)
        # Floating inputs of up to this rank are small; -1 if none are.
        self._rank = self._reduced
        if outer is not None:
            meets_half = max(half_ranks, default=0) > 0
            self._rank = max(self._rank, min(outer, 0) if meets_half else outer)
        self._rank_inside = self._rank if outer is None else max(self._rank, outer)
        # Whether there are no other floating inputs: small outputs are as exact, then.
        self._are_small = bool(wide) and not half_ranks and all(_is_small(x, self._rank) for x in wide)
        self._wide_ranks, self._has_half = {len(x.shape) for x in wide}, bool(half_ranks)
        # Shapes of masks: the leading axes of a larger input, `(batch, time)`, or those of ids.
        self._positions = {
            x.shape[:n] for x in numbers for n in range(2, len(x.shape) + (not dtypes.is_floating(x.dtype)))
        }
        is_few = precision.keeps_small_inputs and self._are_small and not precision.island and _sum_few(own)
        self.precision = precision.as_island() if is_few else precision

    def inside(self) -> Any:
        """A context manager: calls of other modules in the with-block are inside of this one."""
        return _RANK(self._rank_inside)

    def cast_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, floating ones in compute dtype but for those that stay as they came.

        An island normalises what arrives in float32 (an image, positions) as such: half would lose its range.
        """
        if self.precision.island:
            return self._inputs
        dtype, widest = self.precision.compute_dtype, dtypes.promote_dtype(self.precision.policy.param_dtype)

        def cast(x: Any) -> Any:
            if not dtypes.is_floating_array(x) or dtypes.is_half(x.dtype) or not dtypes.is_half(dtype):
                return dtypes.cast_leaf(x, dtype)
            is_kept = _is_small(x, self._rank) and not _convolve(self._own, x.shape)
            is_kept = self.precision.keeps_small_inputs and (is_kept or x.shape in self._positions)
            if not is_kept and _may_meet(self._own, x.shape):
                return dtypes.cast_leaf(x, dtype)
            return dtypes.cast_leaf(x, widest) if x.dtype.itemsize > widest.itemsize else x

        return dtypes.map_changed(cast, self._inputs, self._is_leaf)

    def cast_outputs(
        self,
        out: Any,
        *,
        policy_changes: bool,
        has_params: bool,
        returns_carry: bool,
        in_loop: bool,
        keeps: bool | None = None,
    ) -> Any:
        """What the method returned, as its caller takes it.

        Args:
          out: what it returned.
          policy_changes: whether the caller is under another policy, so that the output dtype applies.
          has_params: whether the module, or one inside of it, has parameters.
          returns_carry: whether a pair is one of a carry, which must keep its dtype, and an output.
          in_loop: whether it is the body of a loop, so that the carry may be all that is returned, too.
          keeps: whether outputs for code under the same policy keep their dtype; left out, small ones do.
        """
        policy = self.precision.policy
        is_kept = self._kept_outputs(out, has_params) if keeps is None else lambda x: keeps

        def cast(x: Any) -> Any:
            if policy_changes:
                return dtypes.cast_leaf(x, policy.output_dtype)
            # Scalars keep their dtype: they cost nothing and are mostly losses, whose cotangent is the scale.
            is_cast = isinstance(x, dtypes.ARRAYS) and len(x.shape) > 0 and not is_kept(x)
            return dtypes.cast_leaf(x, policy.compute_dtype) if is_cast else x

        args, _ = self._inputs
        if args and (returns_carry or in_loop):
            return carries.cast_with_carry(out, args[0], cast, in_loop, self._is_leaf)
        return dtypes.map_changed(cast, out, self._is_leaf)

    def _kept_outputs(self, out: Any, has_params: bool) -> Callable[[Any], bool]:
        if not self.precision.keeps_small_inputs:
            return lambda x: False
        if self._wide_ranks and not (self._has_half or has_params or self.precision.island):
            return lambda x: True
        leaves = jax.tree.leaves(out, self._is_leaf)
        largest = max((len(x.shape) for x in leaves if isinstance(x, dtypes.ARRAYS)), default=0)

        def is_kept(x: Any) -> bool:
            rank = len(x.shape)
            is_beside = rank <= 2 and rank < largest and rank in self._wide_ranks
            return is_beside or rank <= self._reduced or (self._are_small and _is_small(x, self._rank))

        return is_kept


def _is_small(x: Any, rank: int) -> bool:
    """Whether an array costs nothing in float32: of a rank up to this one, or rows of few features."""
    shape = x.shape
    return len(shape) <= rank or (0 < len(shape) <= 3 and shape[-1] < LEAST_TERMS)


def _may_meet(own: Shapes, shape: tuple[int, ...]) -> bool:
    """Whether a product may read an input of such a shape along with a parameter."""
    # The first of several axes is the batch's.
    return own is None or not {size for param in own for size in param}.isdisjoint(shape[1:] or shape)


def _convolve(own: Shapes, shape: tuple[int, ...]) -> bool:
    """Whether a parameter may be the kernel of a convolution of such an input, with many terms."""
    if own is None:
        return len(shape) >= 3
    return any(
        len(param) == len(shape) >= 3 and param[-2] == shape[-1] and math.prod(param[:-1]) >= LEAST_TERMS
        for param in own
    )


def _sum_few(own: Shapes) -> bool:
    """Whether all parameters are for products of too few terms to gain from half precision."""
    kernels = [param for param in own or () if len(param) > 1]
    return bool(own) and all(math.prod(param[:-1]) < LEAST_TERMS for param in kernels)


def policy_changes(caller: Policy | None, policy: Policy) -> bool:
    """Whether what leaves a module is for code under another policy: of other dtypes, or None for none.

    A recipe is about products alone: policies that differ in nothing else have no boundary between them.
    """
    return caller is not policy and (caller is None or _dtypes(caller) != _dtypes(policy))


def _dtypes(policy: Policy) -> tuple[Any, ...]:
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.grad_dtype
