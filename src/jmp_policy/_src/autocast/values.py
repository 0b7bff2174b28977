"""What is known of a value while a program is planned, and what is kept of it while it runs."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.jaxpr import ir
from jmp_policy._src.products import binding
from jmp_policy._src.weight_grads.param_casts import argument_marked

#: "leaf": an untouched argument, or one that was only moved. "constant": a number that stands in the program,
#: or zeros and ones made of a mask. "computed": anything else.
Source: TypeAlias = Literal["leaf", "constant", "computed"]


class Value(NamedTuple):
    """What is known of a value before the program runs. Hashable: plans are kept by it.

    Args:
      dtype: what it will be held in.
      source: where it comes from.
      number: of a constant, what must be representable.
      shared: whether a leaf was broadcast to rows that are all the same, as a bias is.
    """

    dtype: Any
    source: Source = "computed"
    number: float = 0.0
    shared: bool = False

    def fits(self, half: np.dtype) -> bool:
        """Returns whether a constant is in a half dtype's normal range (1e-12 and finfo.min are not)."""
        size = abs(self.number)
        info = jnp.finfo(half)
        return not np.isfinite(size) or size == 0 or float(info.tiny) <= size <= float(info.max)


class CastCache:
    """A value at run time, in each dtype that was asked for; every cast is made once.

    Args:
      value: the array; None if `make` gives it.
      dtype: what the value is in to begin with; left out, its own, if it has one.
      make: gives the array in another dtype. Left out, `value` is cast. For values that only move a parameter
        the parameter is cast first, so that `w` and `w.T` share one cast.
      is_weight: whether casts of it are marked as those of a parameter.
    """

    __slots__ = ("_dtype", "_is_weight", "_made", "_make")

    def __init__(
        self, value: Any, dtype: Any = None, make: Callable[[Any], Any] | None = None, is_weight: bool = False
    ):
        self._dtype = getattr(value, "dtype", None) if dtype is None else dtype
        self._make, self._is_weight = make, is_weight
        self._made = {} if value is None else {self._dtype: value}

    def view(self, dtype: Any, make: Callable[[Any], Any]) -> "CastCache":
        """Returns the cache of what is made of this value, in whichever dtype it is read in.

        Of an array that is no tracer it is made at once: its buffer may be overwritten before that is read.
        """
        value = self._made.get(self._dtype)
        if isinstance(value, jax.Array) and not ir.is_traced(value):
            return CastCache(make(dtype), dtype)
        return CastCache(None, dtype, make)

    def read(self, dtype: Any) -> Any:
        """Returns the value in a dtype; for None, as it is."""
        dtype = self._dtype if dtype is None else dtype
        if dtype not in self._made:
            with argument_marked() if self._is_weight else contextlib.nullcontext():
                self._made[dtype] = self._make(dtype) if self._make else cast(self._made[self._dtype], dtype)
        return self._made[dtype]


#: Whether casts of untouched arguments are marked as those of parameters, whose gradients can be float32.
LEAVES_MARKED = jax.make_user_context(default_value=False)


def argument(value: Any, known: Value) -> CastCache:
    """Returns the cache of casts of an argument."""
    return CastCache(value, is_weight=known.source == "leaf" and LEAVES_MARKED.value)


def cast(value: Any, dtype: Any) -> Any:
    """Casts an array."""
    return value if value.dtype == dtype else binding.converted(value, dtype)
