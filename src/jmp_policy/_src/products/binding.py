"""Binding operations to other values, in a way that JAX differentiates as fast as it does jax.numpy's."""

import collections
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jmp_policy._src.jaxpr import compat, ir, op_table
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.products.functions import primitive_for

#: How often each operation was bound to values of each type in this program so far; None in bodies, which are
#: differentiated whole.
_BOUND: contextvars.ContextVar[Any] = contextvars.ContextVar("operations bound", default=None)

#: Operations that occur more often are bound as jits, of which JAX keeps the derivative.
_OFTEN = 1


def bind_product(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Binds a primitive to values, a product to the implementation that suits them; results as a list."""
    # Ours, in a program that was traced before, goes back to JAX's for operands of other dtypes.
    return compat.bind_primitive(primitive_for(primitive, values, params), values, params)


@contextlib.contextmanager
def program(is_body: bool) -> Iterator[None]:
    """Binds the operations of a whole program, or of the body of a loop or call, in a with-block."""
    token = _BOUND.set(None if is_body else collections.Counter())
    try:
        yield
    finally:
        _BOUND.reset(token)


def run_program(jaxpr: Any, arrays: Sequence[Any], function: Callable[..., Sequence[Any]]) -> list[Any]:
    """The results of a whole traced program, which a function of its arrays runs, as they were traced."""
    opened = compat.open_jaxpr(jaxpr)
    is_explicit = ir.is_explicit(opened.invars)
    # Op by op, constants would not get the shardings that the trace gave them.
    function = jax.jit(function) if is_explicit else function
    with program(is_body=is_explicit):
        made = function(*arrays)
    return [ir.as_array(value, atom) for value, atom in zip(made, opened.outvars, strict=True)]


class _Operation(NamedTuple):
    """What is bound, as a function of its operands; equal to others that do the same.

    Args:
      primitive, params: of the operation.
      context: of its equation (compute type, mesh), under which it is traced once.
      broadcast: operands that are broadcast first, and then cast.
      like, dtype: the type like which those are broadcast, and what they are cast to.
    """

    primitive: Any
    params: tuple[Any, ...]
    context: Any
    broadcast: tuple[int, ...] = ()
    like: Any = None
    dtype: Any = None

    def __call__(self, *values: Any) -> list[Any]:
        given = list(values)
        for place in self.broadcast:
            wide = ir.broadcast_like(given[place], self.like)
            given[place] = jax.lax.convert_element_type(wide, self.dtype)
        return bind_product(self.primitive, given, dict(self.params))


def bind(eqn: Any, *values: Any, **changed: Any) -> list[Any]:
    """Binds an equation's primitive to other values, with some parameters changed; results as a list."""
    params = tuple({**eqn.params, **changed}.items())
    return _bound(_Operation(eqn.primitive, params, compat.context_of(eqn)), values)


def bind_broadcast(eqn: Any, values: Sequence[Any], broadcast: tuple[int, ...], dtype: Any) -> list[Any]:
    """Binds an equation's primitive to values of which some are broadcast first, and then cast.

    As one operation: for a bias that is added JAX keeps one derivative, and not three.

    Args:
      eqn: the equation.
      values: the operands.
      broadcast: which of them are broadcast like the result.
      dtype: what those are cast to.
    """
    params, like = tuple(eqn.params.items()), eqn.outvars[0].aval
    operation = _Operation(eqn.primitive, params, compat.context_of(eqn), broadcast, like, dtype)
    return _bound(operation, values)


def _bound(operation: _Operation, values: Sequence[Any]) -> list[Any]:
    """Binds an operation; one that occurs often in the program as a jit, whose derivative JAX keeps."""
    counts = _BOUND.get()
    is_simple = operation.primitive.name in _SIMPLE
    if counts is None or not is_simple or not any(isinstance(value, Tracer) for value in values):
        return operation(*values)
    # Numbers that stand in the program are no arrays.
    types = (getattr(value, "dtype", type(value)) for value in values)
    key = operation, *zip(map(np.shape, values), types, strict=True)
    try:
        counts[key] += 1
    except TypeError:  # A parameter that cannot be hashed.
        return operation(*values)
    return list(_kept(operation)(*values)) if counts[key] > _OFTEN else operation(*values)


#: Without jaxprs or collectives.
_SIMPLE = frozenset([*op_table.LISTED, "convert_element_type"]) - HAVING[Trait.COLLECTIVE]


@functools.lru_cache(maxsize=4096)
def _kept(operation: _Operation) -> Callable[..., Any]:
    """Returns an operation as an inlined jit, of which JAX keeps the derivative, as it does for jax.numpy's.

    Bound one by one, 60 additions are linearised 60 times, which made tracing the gradient of a Transformer
    1.28 times as long as without autocast.
    """
    return jax.jit(lambda *values: operation(*values), inline=compat.INLINED)


def is_derived_by_operation() -> bool:
    """Returns whether a whole program runs, of which JAX derives each operation when it is bound."""
    return _BOUND.get() is not None


def converted(value: Any, dtype: Any) -> Any:
    """Casts an array."""
    keeps = is_derived_by_operation() and isinstance(value, Tracer)
    with ir.on_its_mesh(value):
        return converted_as_kept(value, dtype) if keeps else jax.lax.convert_element_type(value, dtype)


#: Casts an array that is traced. JAX keeps the derivative, which takes half the time of deriving it again.
converted_as_kept = jax.jit(jax.lax.convert_element_type, static_argnums=1, inline=compat.INLINED)
