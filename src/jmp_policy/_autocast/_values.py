"""What is known of a value while a program is planned, and what is kept of it while it runs."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jmp_policy._autocast import _bind

#: "leaf": an untouched argument, or one that was only moved. "constant": a number that stands in the program,
#: or zeros and ones made of a mask. "computed": anything else.
Source: TypeAlias = Literal["leaf", "constant", "computed"]


class Value(NamedTuple):
    """What is known of a value before the program runs. Hashable: plans are kept by it.

    Args:
      dtype: what it will be held in.
      source: where it comes from.
      number: of a constant, what must be representable.
      broadcast: whether a leaf is copies of a smaller one.
    """

    dtype: Any
    source: Source = "computed"
    number: float = 0.0
    broadcast: bool = False

    def fits(self, half: np.dtype) -> bool:
        """Whether a constant is in the normal range of a half dtype: 1e-12 and float32's lowest are not."""
        size = abs(self.number)
        info = jnp.finfo(half)
        return not np.isfinite(size) or size == 0 or float(info.tiny) <= size <= float(info.max)


class Cell:
    """A value at run time, in each dtype that was asked for; every cast is made once.

    Args:
      value: the array; None if `make` gives it.
      dtype: what the value is in to begin with.
      make: gives the array in another dtype. Left out, `value` is cast. For values that only move a parameter
        the parameter is cast first, so that `w` and `w.T` share one cast.
    """

    __slots__ = ("_dtype", "_made", "_make")

    def __init__(self, value: Any, dtype: Any, make: Callable[[Any], Any] | None = None):
        self._dtype, self._make = dtype, make
        self._made = {} if value is None else {dtype: value}

    def read(self, dtype: Any) -> Any:
        """The value in a dtype; for None, as it is."""
        dtype = self._dtype if dtype is None else dtype
        if dtype not in self._made:
            self._made[dtype] = self._make(dtype) if self._make else cast(self._made[self._dtype], dtype)
        return self._made[dtype]


def computed(value: Any) -> Cell:
    """The cell of an array that an operation gave."""
    return Cell(value, getattr(value, "dtype", None))


def cast(value: Any, dtype: Any) -> Any:
    """An array in another dtype."""
    return value if value.dtype == dtype else _bind.converted(value, dtype)
