"""Estimates the memory of mixed precision from a jaxpr alone, as guides to mixed precision count it.

A half copy of each parameter that is cast, a gradient for each one of whose shape there is a new result, and
the activations: what the forward pass computes and the backward pass reads. As compilers do, only what is
costly to compute is kept: products, reductions, random numbers. What follows from them element by element is
computed again where it is read, and a value takes the widest form in which the backward pass reads it, which
is 8 bits for float8 products.

Bytes are those on one device. A jaxpr has the shapes of all devices together, but inside a `shard_map`: what
is computed outside of one is taken to be divided as the inputs are.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import calls, compat, control_flow, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.ir import evaluate
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.products.fp8.eligibility import formats_of


def analytic_memory_model(
    jaxpr: Any, roles: Sequence[str], donated: Sequence[int] = (), parts: Sequence[int] = ()
) -> Counter[str]:
    """Bytes by category: the arguments', "half copies", "gradients", "activations" and "results".

    Args:
      jaxpr: a closed jaxpr.
      roles: the category of each of its arguments.
      donated: which of them results may overwrite.
      parts: how many devices each of them is divided over; one, if left out.
    """
    return _Accounting(jaxpr, roles, donated, parts or [1] * len(roles)).bytes


@dataclasses.dataclass(frozen=True, eq=False)
class _Made:
    """A value that is costly to compute.

    Args:
      elements: how many it has.
      width: bytes of each.
    """

    elements: int
    width: int


class _Value(NamedTuple):
    """What is known of a value.

    Args:
      made: what the forward pass has to keep for it to be computed again.
      backward: whether the backward pass computed it.
      argument: index of the argument that it is, casts aside.
    """

    made: frozenset[_Made] = frozenset()
    backward: bool = False
    argument: int | None = None


_VIEWS, _COSTLY = HAVING[Trait.VIEW], HAVING[Trait.COSTLY]


class _Accounting:
    """One accounting."""

    def __init__(self, jaxpr: Any, roles: Sequence[str], donated: Sequence[int], parts: Sequence[int]):
        opened = compat.open_jaxpr(jaxpr)
        self._roles, self._parts = roles, parts
        self._elements = [math.prod(_shape(v)) // n for v, n in zip(opened.invars, parts, strict=True)]
        self._devices = max((n for n, role in zip(parts, roles, strict=True) if role == "inputs"), default=1)
        self._has_backward = False
        self._kept: dict[_Made, int] = {}
        self._copies: dict[tuple[int, str], int] = {}
        values = [_Value(argument=i) for i in range(len(opened.invars))]
        results = self._inside(jaxpr, values, backward=False)
        found = Counter[str]()
        for var, role, count in zip(opened.invars, roles, parts, strict=True):
            found[role] += _size(var) // count
        found["half copies"] = sum(self._copies.values())
        found["activations"] = sum(made.elements * min(w, made.width) for made, w in self._kept.items())
        # What is trained comes out as another value: its gradient, or the parameter after the step.
        pairs = zip(opened.outvars, results, strict=True)
        new = Counter(_shape(atom) for atom, v in pairs if v.argument is None and self._has_backward)
        for var, role, count in zip(opened.invars, roles, parts, strict=True):
            if role == "parameters" and new[_shape(var)]:
                new[_shape(var)] -= 1
                found["gradients"] += _size(var) // count
        found["results"] = self._results(opened, results, donated)
        self.bytes = found

    def _results(self, opened: Any, results: Sequence[_Value], donated: Sequence[int]) -> int:
        """The bytes of the results that are no gradients and take no argument's place."""
        types = [(_shape(var), ir.dtype_of(var)) for var in opened.invars]
        weights = {shape for (shape, _), r in zip(types, self._roles, strict=True) if r == "parameters"}
        places = Counter(types[i] for i in donated)
        divided = dict(zip(types, self._parts, strict=True))
        size = 0
        for atom, result in zip(opened.outvars, results, strict=True):
            kind = (_shape(atom), ir.dtype_of(atom))
            if places[kind]:
                places[kind] -= 1
            elif not (result.backward and kind[0] in weights):
                size += _size(atom) // divided.get(kind, 1)
        return size

    def _inside(self, jaxpr: Any, values: Sequence[_Value], backward: bool) -> list[_Value]:
        def step(eqn: Any, operands: Sequence[_Value]) -> list[_Value]:
            return self._equation(eqn, operands, backward or compat.is_transposed(eqn))

        return evaluate(jaxpr, values, step, constant=lambda *_: _Value(), literal=lambda _: _Value())

    def _equation(self, eqn: Any, operands: Sequence[_Value], backward: bool) -> list[_Value]:
        called = calls.looked_into(eqn)
        if called is not None:
            devices, is_of_one = self._devices, calls.kind_of(eqn) is Kind.SHARD_MAP
            self._devices = 1 if is_of_one else devices
            results = self._inside(called.jaxpr, operands[called.skipped :], backward)
            self._devices = devices
            return results
        is_view = eqn.primitive.name in _VIEWS and len(operands) == 1
        if backward and is_view and operands[0].argument is not None:
            return [operands[0]]  # A weight that is cast again, and no gradient.
        if backward:
            self._keep(eqn, operands)
        if calls.kind_of(eqn) is Kind.SCAN and not backward:
            return self._scan(eqn, operands)
        for jaxpr in calls.inner_jaxprs(eqn):
            self._inside(jaxpr, [_Value()] * len(compat.open_jaxpr(jaxpr).invars), backward)
        if backward:
            return [_Value(backward=True)] * len(eqn.outvars)
        return self._forward(eqn, operands)

    def _keep(self, eqn: Any, operands: Sequence[_Value]) -> None:
        """Notes what an operation of the backward pass reads, in the widest form in which it is read."""
        self._has_backward = True
        # What a float8 product reads waits for it in 8 bits; its scales are single numbers.
        widths = [jnp.dtype(name).itemsize for name in formats_of(eqn) or ()]
        widths = widths or list(map(_width, eqn.invars))
        for width, operand in zip(widths, operands, strict=False):
            for made in operand.made:
                self._kept[made] = max(self._kept.get(made, 0), width)

    def _forward(self, eqn: Any, operands: Sequence[_Value]) -> list[_Value]:
        """What is known of the results of an operation of the forward pass.

        A view is its operand. What is computed element by element is computed again where it is read, from
        what its operands are computed from. The rest is kept.
        """
        name = eqn.primitive.name
        if name in _VIEWS and len(operands) == 1:
            (operand,), dtype, i = operands, ir.dtype_of(eqn.outvars[0]), operands[0].argument
            if i is not None and is_half(dtype) and self._roles[i] == "parameters":
                self._copies[i, str(dtype)] = self._elements[i] * dtype.itemsize
            return [operand]
        shapes = {_shape(atom) for atom in (*eqn.invars, *eqn.outvars)}
        is_elementwise = sum(math.prod(shape) != 1 for shape in shapes) <= 1
        if not ir.holds_jaxpr(eqn) and name not in _COSTLY and is_elementwise:
            made = frozenset().union(*(v.made for v in operands))
            return [_Value(made)] * len(eqn.outvars)
        return list(map(self._made, eqn.outvars))

    def _scan(self, eqn: Any, operands: Sequence[_Value]) -> list[_Value]:
        """Accounts for a loop, which keeps what it gives, but for the layers' parameters that it casts."""
        loop = control_flow.loop(eqn, [value._replace(made=frozenset()) for value in operands])
        arguments = [*loop.fixed, *[_Value()] * len(loop.start), *loop.xs]
        results = self._inside(loop.body, arguments, backward=False)
        return [
            result if result.argument is not None else self._made(var)
            for result, var in zip(results, eqn.outvars, strict=True)
        ]

    def _made(self, var: Any) -> _Value:
        return _Value(frozenset([_Made(math.prod(_shape(var)) // self._devices, _width(var))]))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _width(atom: Any) -> int:
    """The bytes of an element; 0 for tokens and keys of random numbers."""
    return getattr(ir.dtype_of(atom), "itemsize", 0) if hasattr(atom.aval, "shape") else 0


def _size(atom: Any) -> int:
    return math.prod(_shape(atom)) * _width(atom)
