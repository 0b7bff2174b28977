"""Bounds gradients that are made of others in float32, so that the finite test need not read them.

The gradient of a weight-normalised kernel is `g * a + v * b`: half gradient and kernel, each times a vector.
XLA computes it within the optimizer's kernel, so its test is one more kernel that reads `g` and `v`. But `b`
comes from sums over `g * v`, and a kernel that reads both for one sum makes others for nothing:

    g * a + v * b                         gradient, [rows, columns]
    sum(|g|) * |a| + sum(|v|) * |b|       its bound, [columns]

No element of the gradient is larger than the bound, and an infinity or NaN in an operand makes the bound one.
So where the bound is finite, the gradient is. Where it is not, neither is the gradient, or its terms are so
large that float32 cannot hold the sums of their magnitudes: more than 1e30.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.jaxpr.data_flow import made_by
from jmp_policy._src.loss_scaling.decision import is_small

#: Number of a term, or the name of an operation and its operands.
Expression: TypeAlias = int | tuple[Any, ...]
#: Axes of the gradient along which a term varies; None for one of the gradient's shape.
Axes: TypeAlias = tuple[int, ...] | None

#: What operations do to magnitudes at most.
_OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "add": lax.add,
    "add_any": lax.add,
    "sub": lax.add,
    "mul": lax.mul,
    "div": lax.div,
}
#: Operations that leave magnitudes as they are.
_IDENTITIES = ("convert_element_type", "copy", "neg")
#: Terms of the gradient's shape. More than a parameter and its gradient nobody reads for one sum.
_MOST_ARRAYS = 2
#: On the way from the terms to the gradient; that of a weight-normalised kernel takes 16.
_MOST_OPERATIONS = 64


class Form(NamedTuple):
    """How a bound is computed from the terms of a gradient.

    Args:
      expression: of the terms' magnitudes.
      axes: for each term its axis along which the bound varies, or None if it has one element.
      length: of the bound.
    """

    expression: Expression
    axes: tuple[int | None, ...]
    length: int


class Bound(NamedTuple):
    """Bound of the magnitudes in a gradient, along one of its axes.

    Args:
      form: how it is computed.
      terms: what from.
    """

    form: Form
    terms: tuple[jax.Array, ...]


def bound_of(x: jax.Array) -> Bound | None:
    """Returns a bound of a large float32 array that the running trace shows to be made of arrays and vectors.

    None for an array that is made without vectors: no sums were computed for it, which a bound could share.
    """
    if x.dtype != jnp.float32 or is_small(x) or not all(isinstance(size, int) for size in x.shape):
        return None
    maker = _Maker(x.shape)
    expression, terms = maker.expression(x), maker.terms
    vectors = {axes for _, axes in terms if axes}
    arrays = sum(axes is None for _, axes in terms)
    if expression is None or len(vectors) != 1 or not 0 < arrays <= _MOST_ARRAYS:
        return None
    ((axis,),) = vectors
    kept = tuple(
        axis if axes is None else next(iter(_varying(term)), None) for (_, axes), term in terms.items()
    )
    return Bound(Form(expression, kept, x.shape[axis]), tuple(terms.values()))


def are_finite(forms: Sequence[Form], terms: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """Returns whether bounds of one expression are finite; one boolean vector, of all together."""
    rows = [
        [_row(term, axis, form.length) for term, axis in zip(each, form.axes, strict=True)]
        for form, each in zip(forms, terms, strict=True)
    ]
    # Joined, so that one kernel does the arithmetic of all.
    joined = lax.optimization_barrier([lax.concatenate(term, 0) for term in zip(*rows, strict=True)])
    # Twice the bound, since the gradient may be rounded otherwise: the compiler fuses products with sums.
    return jnp.isfinite(2 * _magnitude(forms[0].expression, joined))


class _Maker:
    """Finds how one gradient is made.

    Args:
      shape: the gradient's.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.terms: dict[tuple[int, Axes], Any] = {}
        self._shape, self._operations = shape, 0

    def expression(self, x: Any) -> Expression | None:
        """Returns how an array of the gradient's shape, or one that is broadcast to it, is made of `terms`.

        None if its magnitude is not known to have a bound, or if that takes too many operations. What several
        operations read is looked at by each of them.
        """
        self._operations += 1
        if self._operations > _MOST_OPERATIONS:
            return None
        made = made_by(x)
        if made and made.name == "broadcast_in_dim" and made.operands[0].size < x.size:
            operand, axes = made.operands[0], made.parameters["broadcast_dimensions"]
            return self._vector(operand, [int(axes[i]) for i in _varying(operand)])
        if jnp.shape(x) != self._shape:
            return self._vector(x, _varying(x))
        # Half precision overflows, and integers wrap, where a bound in float32 does not.
        if made and x.dtype == jnp.float32 and made.name in _IDENTITIES:
            return self.expression(made.operands[0])
        if not made or x.dtype != jnp.float32 or made.name not in _OPERATIONS:
            return self._term(x, None)
        parts = tuple(self.expression(operand) for operand in made.operands)
        # The bound of a divisor must be its magnitude: a larger divisor makes a smaller quotient.
        if None in parts or (made.name == "div" and not self._is_vector(parts[1])):
            return None
        return (made.name, *parts)

    def _vector(self, x: Any, axes: list[int]) -> Expression | None:
        return self._term(x, tuple(axes)) if len(axes) < 2 else None

    def _term(self, x: Any, axes: Axes) -> int:
        key = (id(x), axes)
        self.terms.setdefault(key, x)
        return list(self.terms).index(key)

    def _is_vector(self, expression: Expression | None) -> bool:
        return isinstance(expression, int) and list(self.terms)[expression][1] is not None


def _varying(x: Any) -> list[int]:
    return [axis for axis, size in enumerate(jnp.shape(x)) if size != 1]


def _row(term: jax.Array, axis: int | None, length: int) -> jax.Array:
    """Returns sums of magnitudes over all axes but one; none is smaller than a magnitude in it."""
    # Sums and no maxima: a sum is surely NaN where an element is.
    magnitudes = lax.abs(lax.convert_element_type(term, jnp.float32))
    total = jnp.sum(magnitudes, axis=[i for i in range(magnitudes.ndim) if i != axis])
    return jnp.broadcast_to(total, (length,))


def _magnitude(expression: Expression, terms: Sequence[jax.Array]) -> jax.Array:
    if isinstance(expression, int):
        return terms[expression]
    name, *operands = expression
    return _OPERATIONS[name](*(_magnitude(operand, terms) for operand in operands))
