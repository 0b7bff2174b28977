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

Small inputs of those stay float32 too: scalars, vectors next to larger inputs, masks (a number per position
of another input), and what has fewer than 8 features. They cost nothing in float32, and `sin(2e4 * t)` of a
half `t` is off by 40 radians. A module that is given nothing else, and whose parameters sum fewer than 8
numbers, computes in float32. A vector alone is cast; inside of a call that was given larger inputs it stays,
unless a half vector comes with it (the state of a recurrent cell).

Outputs for code under the same policy are in compute dtype, but for small ones of small inputs, what a module
without parameters made of float32 inputs (spectrograms), sums down to a vector in float32 (log-likelihoods),
and what is passed on beside a larger output (paddings).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jmp_policy._src.core.dtypes import (
    ARRAYS,
    cast_leaf,
    is_floating,
    is_half,
    is_number,
    is_wide,
    map_changed,
    promote_dtype,
)
from jmp_policy._src.policy import carries
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import role_by_name, role_in_stack


@dataclasses.dataclass(frozen=True)
class ModulePrecision:
    """Policy of one module, and whether the module is a float32 island.

    An island computes in float32 inside a half-precision model (a normalisation layer, or one whose product
    sums fewer than `LEAST_TERMS` numbers); it takes and returns the compute dtype of its policy. A recipe is
    asked for where a rule with one names the module itself, by its path or a predicate.
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
        return promote_dtype(self.policy.param_dtype) if self.island else self.policy.param_dtype

    @functools.cached_property
    def used_param_dtype(self) -> np.dtype:
        """The dtype of parameters where they are used."""
        return self.param_dtype if self.island else self.policy.compute_dtype

    def as_island(self) -> "ModulePrecision":
        """The same policy, computed in float32."""
        return dataclasses.replace(self, island=True)

    def recipe_at(self, path: str, outputs: Any, last: frozenset[str]) -> str | None:
        """The recipe of a layer; None where its role leaves it out (`role_by_name`, `role_in_stack`)."""
        if self.policy.recipe is None or self.island:
            return None
        role = role_by_name(path, outputs) or role_in_stack(self.policy.recipe, path, last)
        return None if role and not self.recipe_is_asked_for else self.policy.recipe


#: The least number of terms of a product that gains from half precision: Tensor Cores multiply 8 by 8.
LEAST_TERMS = 8

#: The rank up to which inputs are small in the governed module that is running; None outside of all.
_RANK = jax.make_user_context(default_value=None)


@dataclasses.dataclass(frozen=True)
class SmallInputs:
    """Which inputs of one call stay as they came.

    Args:
      rank: floating inputs of up to this rank are small; -1 if none are.
      are_all: whether the call has no other floating inputs: small outputs are as exact, then.
      rank_inside: the same rank for what is called inside of this call, alone.
      reduced: up to which rank a float32 output is a sum or a mean over an axis, such as a likelihood.
      wide_ranks: the ranks of inputs in float32.
      positions: shapes of masks: the leading axes of a larger input, `(batch, time)`, or those of ids.
      has_half: whether there are half inputs.
    """

    rank: int
    are_all: bool
    rank_inside: int
    reduced: int
    wide_ranks: frozenset[int]
    has_half: bool
    positions: frozenset[tuple[int, ...]]

    def inside(self) -> Any:
        """A context manager: calls of other modules in the with-block are inside of this one."""
        return _RANK(self.rank_inside)

    def kept_outputs(
        self, out: Any, precision: ModulePrecision, has_params: bool, is_leaf: Any = None
    ) -> Callable[[Any], bool]:
        """Which outputs of the call keep their dtype for code under the same policy; scalars always do.

        Parameters are the module's, or of one inside of it.
        """
        if not precision.keeps_small_inputs:
            return lambda x: False
        if self.wide_ranks and not (self.has_half or has_params or precision.island):
            return lambda x: True
        largest = max(
            (len(x.shape) for x in jax.tree.leaves(out, is_leaf) if isinstance(x, ARRAYS)), default=0
        )

        def is_kept(x: Any) -> bool:
            rank = len(x.shape)
            is_beside = rank <= 2 and rank < largest and rank in self.wide_ranks
            return is_beside or rank <= self.reduced or (self.are_all and is_small(x, self.rank))

        return is_kept


def small_inputs(inputs: Any, is_leaf: Callable[[Any], bool] | None = None) -> SmallInputs:
    """Finds the small inputs of a call, in a pytree of what it is given."""
    outer, leaves = _RANK.value, jax.tree.leaves(inputs, is_leaf)
    # No boolean masks, and no keys. A number is an input where there is nothing else.
    numbers = [x for x in leaves if isinstance(x, ARRAYS) and is_number(x.dtype)]
    numbers = numbers or [np.float32(0) for x in leaves if isinstance(x, float)]
    half_ranks = [len(x.shape) for x in numbers if is_half(x.dtype)]
    wide = [x for x in numbers if is_wide(x.dtype)]
    rank = reduced = min(1, max((len(x.shape) for x in numbers), default=0) - 1)
    if outer is not None:
        meets_half = max(half_ranks, default=0) > 0
        rank = max(rank, min(outer, 0) if meets_half else outer)
    are_all = bool(wide) and not half_ranks and all(is_small(x, rank) for x in wide)
    wide_ranks = frozenset(len(x.shape) for x in wide)
    positions = {x.shape[:n] for x in numbers for n in range(2, len(x.shape) + (not is_floating(x.dtype)))}
    return SmallInputs(
        rank,
        are_all,
        rank if outer is None else max(rank, outer),
        reduced,
        wide_ranks,
        bool(half_ranks),
        frozenset(positions),
    )


def is_small(x: Any, rank: int) -> bool:
    """Whether an array costs nothing in float32: of a rank up to this one, or rows of few features."""
    shape = x.shape
    return len(shape) <= rank or (0 < len(shape) <= 3 and shape[-1] < LEAST_TERMS)


@dataclasses.dataclass(frozen=True)
class OwnParams:
    """The shapes of the parameters that a module itself has; None if it is about to make them."""

    shapes: tuple[tuple[int, ...], ...] | None

    def may_meet(self, shape: tuple[int, ...]) -> bool:
        """Whether a product may read an input of such a shape along with one of them."""
        if self.shapes is None:
            return True
        sizes = {size for own in self.shapes for size in own}
        # The first of several axes is the batch's.
        return any(size in sizes for size in (shape[1:] or shape))

    def convolve(self, shape: tuple[int, ...]) -> bool:
        """Whether one of them may be the kernel of a convolution of such an input, with many terms."""
        if self.shapes is None:
            return len(shape) >= 3
        return any(
            len(own) == len(shape) >= 3 and own[-2] == shape[-1] and math.prod(own[:-1]) >= LEAST_TERMS
            for own in self.shapes
        )

    def sum_few(self) -> bool:
        """Whether all of them are for products of too few terms to gain from half precision."""
        kernels = [own for own in self.shapes or () if len(own) > 1]
        return bool(self.shapes) and all(math.prod(own[:-1]) < LEAST_TERMS for own in kernels)

    @classmethod
    def of(cls, params: Iterable[Any]) -> "OwnParams":
        """Those of some arrays."""
        return cls(tuple(x.shape for x in params if hasattr(x, "shape")))


def cast_inputs(
    tree: Any,
    precision: ModulePrecision,
    small: SmallInputs,
    own: OwnParams,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Casts floating inputs of a call to compute dtype, but those that stay as they came.

    Those are no wider than float32, or than the parameters.
    """
    dtype, widest = precision.compute_dtype, promote_dtype(precision.policy.param_dtype)
    rank = small.rank if precision.keeps_small_inputs else -1

    def cast(x: Any) -> Any:
        if not (isinstance(x, ARRAYS) and is_floating(x.dtype)) or is_half(x.dtype) or not is_half(dtype):
            return cast_leaf(x, dtype)
        is_kept = is_small(x, rank) and not own.convolve(x.shape)
        is_kept = precision.keeps_small_inputs and (is_kept or x.shape in small.positions)
        if not (is_kept or not own.may_meet(x.shape)):
            return cast_leaf(x, dtype)
        return cast_leaf(x, widest) if x.dtype.itemsize > widest.itemsize else x

    return map_changed(cast, tree, is_leaf)


def policy_changes(caller: Policy | None, policy: Policy) -> bool:
    """Whether what leaves a module is for code under another policy.

    The caller is None for code outside of every module. A recipe is about products alone: policies that
    differ in nothing else have no boundary between them.
    """
    return caller is not policy and (caller is None or _dtypes(caller) != _dtypes(policy))


def _dtypes(policy: Policy) -> tuple[Any, ...]:
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.grad_dtype


def cast_outputs(
    out: Any,
    given: tuple[Any, ...],
    policy: Policy,
    *,
    policy_changes: bool,
    returns_carry: bool,
    may_return_carry_only: bool = False,
    keeps: Callable[[Any], bool] = lambda x: False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Casts the outputs of a module's method for its caller.

    Args:
      out: what the method returned.
      given: the positional arguments as they came, before any cast.
      policy: the module's policy.
      policy_changes: whether the caller is under another one, so that the output dtype applies.
      returns_carry: whether a pair is one of a carry, which must keep its dtype, and an output, as the body
        of `lax.scan` returns it.
      may_return_carry_only: whether the carry may be all that is returned.
      keeps: whether an output array for code under the same policy keeps its dtype.
      is_leaf: as for `jax.tree.flatten`.
    """

    def cast(x: Any) -> Any:
        if policy_changes:
            return cast_leaf(x, policy.output_dtype)
        # Scalars keep their dtype: they cost nothing and are mostly losses, whose cotangent is the scale.
        is_cast = isinstance(x, ARRAYS) and len(x.shape) > 0 and not keeps(x)
        return cast_leaf(x, policy.compute_dtype) if is_cast else x

    if not (given and (returns_carry or may_return_carry_only)):
        return map_changed(cast, out, is_leaf)
    return carries.cast_with_carry(out, given[0], cast, returns_carry, may_return_carry_only, is_leaf)
