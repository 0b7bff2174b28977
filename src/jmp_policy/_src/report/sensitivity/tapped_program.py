"""Runs a program that was traced in half precision in float32, with a tap wherever it would round.

The dtypes that a program was traced in say where it rounds: what a policy keeps in float32 (normalisation
layers, small inputs, sums of `jnp.sum`) was traced so, and has no taps. Each tap counts for the module whose
code made the value:

- where a module's operation makes a half value, the value is rounded, and where another of its operations
  reads it, the cotangent is, unless the operation only moves numbers or its transpose does;
- where a module reads a half value of another one, it would round it itself if the other one were float32;
  where another one reads its values, their cotangents are rounded when they come in.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.narrowing import narrowed
from jmp_policy._src.jaxpr import calls, compat, control_flow, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.float32_replay import (
    as_traced,
    evaluate_in_float32,
    holds_half,
    replay_equation,
    rounds_in_steps,
    to_float32,
)
from jmp_policy._src.jaxpr.interpreter import Carries, Interpreter
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import Walk, size

#: Operations whose operands may be broadcast along axes of size 1, which their transposes sum over.
_BROADCASTING = HAVING[Trait.BROADCASTS]

_POWERS = {"rsqrt": -0.5, "div": -1}

#: Derivatives of these are computed from their operands or results.
_CURVED = HAVING[Trait.NONLINEAR] - HAVING[Trait.EXACT]

_EXACT, _EXACT_TRANSPOSE = HAVING[Trait.EXACT], HAVING[Trait.EXACT_TRANSPOSE]


class Which(NamedTuple):
    """What a tap rounds and counts.

    Args:
      value: those of the value.
      cotangent: those of its cotangent.
      dtype: "float16" or "bfloat16".
    """

    value: bool
    cotangent: bool
    dtype: str


class Sink(NamedTuple):
    """Name of a sink.

    Args:
      group: what its rounding counts for.
      alone: whether it is rounded only because other modules compute in float32: what comes in and leaves.
    """

    group: str
    alone: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tap(which: Which, x: Any, rounded: Any, sink: Any) -> Any:
    """A value on its way through a tap: the sink says what becomes of it and of its cotangent.

    `rounded` is what the sink found out about its rounding: one for all taps of a value.
    """
    return _tap_forward(which, x, rounded, sink)[0]


def _tap_forward(which: Which, x: Any, rounded: Any, sink: Any) -> Any:
    return (sink.forward(x, rounded) if which.value else x), (sink, rounded)


def _tap_backward(which: Which, kept: Any, g: Any) -> Any:
    sink, rounded = kept
    g, found = sink.backward(which, rounded, g)
    return g, None, found


tap.defvjp(_tap_forward, _tap_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def tap_sum(transposable: Callable[..., Any], dtype: str, x: Any, others: Any, sink: Any) -> Any:
    """Computes a linear function of x whose transpose adds up, such as a broadcast or a look-up.

    The sink is given its transpose in float32 and in half, as this platform computes it.

    Args:
      transposable: the function of x, in any dtype, and of `others`.
      dtype: "float16" or "bfloat16".
      x: its operand.
      others: further operands, of which there are no derivatives: places to look up.
      sink: what rounds and counts.
    """
    return transposable(x, *others)


def _sum_forward(transposable: Any, dtype: str, x: Any, others: Any, sink: Any) -> Any:
    return transposable(x, *others), (jax.numpy.zeros_like(x), others, sink)


def _sum_backward(transposable: Any, dtype: str, residuals: Any, g: Any) -> Any:
    like, others, sink = residuals

    def transposed(g: Any, dtype: str) -> Any:
        (out,) = jax.linear_transpose(lambda x: transposable(x, *others), like.astype(dtype))(g.astype(dtype))
        return out.astype(np.float32)

    half = transposed(jax.lax.stop_gradient(g) * sink.scale, dtype) / sink.scale
    exact, found = sink.of_sum(transposed(g, "float32"), half, dtype)
    return exact, None, found


tap_sum.defvjp(_sum_forward, _sum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def tap_rule(exact: Callable[..., Any], half: Callable[..., Any], dtype: str, arrays: Any, sinks: Any) -> Any:
    """Computes a function whose derivative is computed from its result, which is rounded in half (logaddexp).

    Args:
      exact: the function in float32.
      half: the same in half, of float32 arrays and with such results.
      dtype: "float16" or "bfloat16".
      arrays: its operands.
      sinks: what rounds and counts, for each of them.
    """
    return exact(*arrays)


def _rule_forward(exact: Any, half: Any, dtype: str, arrays: Any, sinks: Any) -> Any:
    return exact(*arrays), (arrays, sinks)


def _rule_backward(exact: Any, half: Any, dtype: str, residuals: Any, g: Any) -> Any:
    arrays, sinks = residuals
    _, transposed = jax.vjp(exact, *arrays)
    rounded = [narrowed(x, dtype).astype(np.float32) for x in jax.lax.stop_gradient(arrays)]
    scaled = [jax.lax.stop_gradient(x) * sinks[0].scale for x in g]
    in_half, in_float32 = (jax.vjp(function, *rounded)[1](scaled) for function in (half, exact))
    # The rounding of the cotangent itself counts where the operand is made.
    pairs = zip(in_half, in_float32, sinks, strict=True)
    errors = [(a - narrowed(b, dtype).astype(np.float32)) / sink.scale for a, b, sink in pairs]
    rows = zip(sinks, transposed(g), errors, strict=True)
    return [sink.of_rule(x, error) for sink, x, error in rows], None


tap_rule.defvjp(_rule_forward, _rule_backward)


class Tapped:
    """Value of a running program.

    Args:
      array: as the module that made it sees it.
      group: what its rounding counts for; None for nothing.
      rounded: what a sink found out about its rounding; None if none was asked.
    """

    __slots__ = ("array", "group", "rounded", "seen_by")

    def __init__(self, array: Any, group: str | None = None):
        self.array, self.group, self.rounded = array, group, None
        #: By the group that reads it ("" for others), the array as that group sees it.
        self.seen_by: dict[str, Any] = {}

    def within(self) -> "Tapped":
        """The value in a trace of its own, of which nothing must be kept outside."""
        inner = Tapped(self.array, self.group)
        inner.rounded, inner.seen_by = self.rounded, dict(self.seen_by)
        return inner


jax.tree_util.register_pytree_node(
    Tapped, lambda x: ((x.array,), x.group), lambda group, arrays: Tapped(arrays[0], group)
)


class _Carries(Carries):
    """Carries, of which the first and those of later trips may be of different groups."""

    def end(self, results: list[Tapped]) -> list[Tapped]:
        self._made = [value.group for value in results]
        return [Tapped(r.array, first.group) for r, first in zip(results, self.start, strict=True)]

    def last(self, carry: list[Tapped]) -> list[Tapped]:
        return [Tapped(value.array, group) for value, group in zip(carry, self._made, strict=True)]


class TappedProgram(Interpreter):
    """One run.

    Args:
      group_of: function from the names of the scopes around an operation to what its rounding counts for;
        None for what is not asked about.
      sinks: what rounds and counts where the program would round, by what it counts for. Without any nothing
        is done.
      dtype: "float16" or "bfloat16".
      written: of half constants that are other numbers in the source, those numbers, as of `LostConstants`.
    """

    def __init__(
        self,
        group_of: Callable[[tuple[str, ...]], str | None],
        sinks: Mapping[Sink, Any],
        dtype: str,
        written: Mapping[tuple[int, int], float] = MappingProxyType({}),
    ):
        self._group_of, self._sinks, self._dtype, self._written = group_of, sinks, dtype, written
        self._readers: Mapping[Any, Sequence[Any]] = {}
        self.groups: dict[str, None] = {}

    def __call__(self, jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        """The results of a closed jaxpr, in float32."""
        return [self._outside(out) for out in self.run(jaxpr, [Tapped(to_float32(x)) for x in arrays], ())]

    def run(self, jaxpr: Any, values: Sequence[Tapped], where: tuple[str, ...] = ()) -> list[Tapped]:
        """The results of a jaxpr, within scopes of these names."""
        opened, around = compat.open_jaxpr(jaxpr), self._readers
        self._readers = _readers(opened, lambda eqn: self._group_of(self.at(eqn, where)))
        try:
            outs = super().run(jaxpr, values, where)
        finally:
            self._readers = around
        return [
            Tapped(ir.as_array(out.array, atom), out.group)
            for out, atom in zip(outs, opened.outvars, strict=True)
        ]

    def at(self, eqn: Any, around: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the scopes around an operation."""
        return (*around, *compat.scopes(eqn))

    def constant(self, atom: Any, value: Any) -> Tapped:
        """A constant, which belongs to no module."""
        is_literal = isinstance(atom, compat.Literal)
        return Tapped(to_float32(np.asarray(value, ir.dtype_of(atom)) if is_literal else value))

    def enters(self, eqn: Any, kind: Kind, values: list[Tapped]) -> bool:
        """Whether it is run: not a while loop, which nothing differentiates backward, nor own derivatives."""
        if kind in (Kind.SCAN, Kind.COND):
            return holds_half(eqn)
        return kind not in (Kind.WHILE, Kind.CUSTOM_JVP, Kind.CUSTOM_VJP) and not calls.is_draw(eqn)

    def carries(self, eqn: Any, loop: control_flow.Loop, where: Any) -> Carries:
        """Carries that may change their group: from the first on they are of the one that ends a trip."""
        body = compat.open_jaxpr(loop.body)
        groups = {var: self._group_of(self.at(e, where)) for e in body.eqns for var in e.outvars}
        start = list[Tapped]()
        for value, atom in zip(loop.start, body.outvars, strict=False):
            group = groups.get(atom, value.group) if _is_half_variable(atom) else value.group
            start.append(value if group == value.group else Tapped(self._outside(value), group))
        return _Carries(start)

    def inside(self, jaxpr: Any, take: Callable[[], list[Tapped]], where: Any) -> tuple[list[Tapped], Any]:
        """Runs a jaxpr in a trace of its own."""
        return super().inside(jaxpr, lambda: [value.within() for value in take()], where)

    def cond(self, eqn: Any, values: list[Tapped], where: Any) -> Sequence[Tapped]:
        """Runs a branch; results are of the groups that the last one gives them."""
        groups: list[str | None] = []

        def branch(jaxpr: Any) -> Callable[..., list[Any]]:
            def function(*operands: Tapped) -> list[Any]:
                outs = self.run(jaxpr, list(operands), where)
                groups[:] = [out.group for out in outs]
                return [out.array for out in outs]

            return function

        index, *operands = values
        outs = control_flow.cond(list(map(branch, control_flow.branches(eqn))), [index.array, *operands])
        return list(map(Tapped, outs, groups))

    def operation(self, eqn: Any, values: list[Tapped], where: tuple[str, ...]) -> Sequence[Tapped]:
        """Does an operation in float32, with taps on its operands and results."""
        if calls.kind_of(eqn) is Kind.WHILE and holds_half(eqn):
            return list(map(Tapped, replay_equation(eqn, list(map(self._outside, values)))))
        group = self._group_of(where)
        arrays = [self._operand(value, eqn, place, group) for place, value in enumerate(values)]
        factor, has_rule = _derivative(eqn), _has_rule(eqn)
        if factor is not None and self._is_asked(group):
            place, power = factor
            sink, x = self._sinks[Sink(group, False)].beside(arrays[place]), arrays[place]
            counts = sink.of_derivative(x, max(abs(power), 1) * x ** (power - 1), self._dtype)
            arrays[place] = tap(Which(True, False, self._dtype), x, counts, sink)
            if power < 0 and isinstance(power, int):
                arrays[place] = sink.without_derivative(arrays[place], x ** (1 - power), self._dtype)
        if _adds_up_cotangents(eqn) and self._is_asked(group):
            outs = self._summed(eqn, arrays, group)
        elif holds_half(eqn):
            has_own = calls.kind_of(eqn) in (Kind.CUSTOM_JVP, Kind.CUSTOM_VJP)
            if has_rule and self._is_asked(group):
                outs = self._by_rule(eqn, arrays, group)
            else:
                outs = (_with_own_derivative if has_own else replay_equation)(eqn, arrays)
        else:
            outs = self.bind(eqn, *arrays)
        made = [
            Tapped(out, group if is_half(ir.dtype_of(var)) else None)
            for var, out in zip(eqn.outvars, outs, strict=True)
        ]
        if (has_rule or rounds_in_steps(eqn)) and self._is_asked(group):
            for of, half, exact in zip(made, *_in_half(eqn, arrays, self._dtype), strict=True):
                of.rounded = self._sinks[Sink(group, False)].computed(of.array, half, exact)
        for of, var in zip(made, eqn.outvars, strict=True):
            self._round(of, eqn, var)
        return made

    def _round(self, made: Tapped, eqn: Any, var: Any) -> None:
        """Puts a tap on a half result of an operation."""
        if made.group is None:
            return
        is_cast = eqn.primitive.name == "convert_element_type"
        forward = not is_half(ir.dtype_of(eqn.invars[0])) if is_cast else eqn.primitive.name not in _EXACT
        own = [reader for reader, reader_group in self._readers.get(var, ()) if reader_group == made.group]
        backward = len(own) > 1 or any(reader.primitive.name not in _EXACT_TRANSPOSE for reader in own)
        made.array = self._tapped(made, made.array, made.group, forward, backward)

    def _operand(self, value: Tapped, eqn: Any, place: int, group: str | None) -> Any:
        """An operand; a constant that half precision makes another number is rounded where it is read."""
        number = self._written.get((id(eqn), place))
        if number is None:
            return self._read(value, eqn.invars[place], eqn, group)
        wide = Tapped(jax.numpy.full_like(value.array, number), group)
        return self._tapped(wide, wide.array, group, True, False)

    def _read(self, value: Tapped, atom: Any, eqn: Any, group: str | None) -> Any:
        """A value as an operation of a group reads it."""
        if value.group == group or not is_half(ir.dtype_of(atom)):
            return value.array
        outside = self._outside(value)
        if group is None or eqn.primitive.name == "convert_element_type":
            return outside
        if group not in value.seen_by:
            # It computes with it in half, and would round it itself.
            value.seen_by[group] = self._tapped(value, outside, group, True, True, alone=True)
        return value.seen_by[group]

    def _outside(self, value: Tapped) -> Any:
        """A value as modules see it that did not make it."""
        if "" not in value.seen_by:
            value.seen_by[""] = self._tapped(value, value.array, value.group, False, True, alone=True)
        return value.seen_by[""]

    def _tapped(
        self, of: Tapped, array: Any, group: str | None, value: bool, cotangent: bool, alone: bool = False
    ) -> Any:
        """The array of a value with a tap on it, if somebody asks about the group."""
        if not (value or cotangent) or not self._is_asked(group):
            return array
        sink = self._sinks[Sink(group, alone)]
        if value and of.rounded is None:
            of.rounded = sink.rounded(of.array, self._dtype)
        which = Which(value, cotangent, self._dtype)
        return tap(which, array, of.rounded if value else None, sink.beside(array))

    def _is_asked(self, group: str | None) -> TypeGuard[str]:
        if group is not None:
            self.groups[group] = None
        return group is not None and Sink(group, False) in self._sinks

    def _by_rule(self, eqn: Any, arrays: list[Any], group: str) -> list[Any]:
        sink = self._sinks[Sink(group, False)]
        exact, half = (lambda *x, run=run: list(run(eqn, x)) for run in (_with_own_derivative, as_traced))
        return tap_rule(exact, half, self._dtype, arrays, list(map(sink.beside, arrays)))

    def _summed(self, eqn: Any, arrays: list[Any], group: str) -> list[Any]:
        """Runs an operation of which a transpose adds up half terms, with a tap on the sum."""
        sink = self._sinks[Sink(group, False)]

        def summed(transposable: Callable[..., Any], x: Any, *others: Any) -> Any:
            return tap_sum(transposable, self._dtype, x, others, sink.beside(x))

        if eqn.primitive.name not in _BROADCASTING:
            return [summed(lambda *operands: self.bind(eqn, *operands)[0], *arrays)]
        (result,) = eqn.outvars
        full = [
            summed(lambda x: ir.broadcast_like(x, result.aval), x)
            if _is_half_and_smaller(atom, result)
            else x
            for x, atom in zip(arrays, eqn.invars, strict=True)
        ]
        return self.bind(eqn, *full)


def _has_rule(eqn: Any) -> bool:
    """Whether an operation has a derivative of its own that half precision may compute inexactly."""
    are_half = all(map(_is_half_variable, [*eqn.invars, *eqn.outvars]))
    if calls.kind_of(eqn) is not Kind.CUSTOM_JVP or not are_half:
        return False
    return any(inner.primitive.name in _CURVED for inner, *_ in Walk(eqn.params["call_jaxpr"]).operations)


def _in_half(eqn: Any, arrays: Sequence[Any], dtype: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """What an operation gives in half, and in float32, both of operands rounded to half."""
    rounded = [
        narrowed(x, dtype).astype(np.float32) if is_half(ir.dtype_of(atom)) else x
        for x, atom in zip(jax.lax.stop_gradient(list(arrays)), eqn.invars, strict=True)
    ]
    return as_traced(eqn, rounded), replay_equation(eqn, rounded)


def _derivative(eqn: Any) -> tuple[int, float] | None:
    """An operand, and to which power it is raised, so that its cotangent is multiplied by a power of it.

    Of divisions and powers alone, whose derivative may be infinite where neither values nor cotangents are.
    """
    name, place = eqn.primitive.name, int(eqn.primitive.name == "div")
    power = eqn.params["y"] if name == "integer_pow" else _POWERS.get(name)
    if power is None or not _is_half_variable(eqn.invars[place]):
        return None
    return place, power


def _readers(opened: Any, group_of: Callable[[Any], str | None]) -> dict[Any, list[Any]]:
    """By half variable the operations of a jaxpr that read it, each with its group."""
    found: dict[Any, list[Any]] = {}
    for eqn in opened.eqns:
        for atom in filter(_is_half_variable, eqn.invars):
            found.setdefault(atom, []).append((eqn, group_of(eqn)))
    return found


def _adds_up_cotangents(eqn: Any) -> bool:
    """Whether a transpose of an operation adds up half terms: of a bias, of the rows of a table."""
    name = eqn.primitive.name
    if name == "gather":
        return _is_half_variable(eqn.invars[0])
    if name == "broadcast_in_dim":
        return _is_half_and_smaller(eqn.invars[0], eqn.outvars[0])
    broadcasts = name in _BROADCASTING and len(eqn.outvars) == 1
    return broadcasts and any(_is_half_and_smaller(atom, eqn.outvars[0]) for atom in eqn.invars)


def _is_half_variable(atom: Any) -> bool:
    return not isinstance(atom, compat.Literal) and is_half(ir.dtype_of(atom))


def _is_half_and_smaller(atom: Any, result: Any) -> bool:
    return _is_half_variable(atom) and size(atom) < size(result)


def _with_own_derivative(eqn: Any, arrays: Sequence[Any]) -> Sequence[Any]:
    """Computes a function that keeps its own derivative, since the replay is differentiated here.

    A custom_jvp in float32; a custom_vjp as it was traced, since its passes know the dtypes of each other.
    """
    if calls.kind_of(eqn) is Kind.CUSTOM_VJP:
        return as_traced(eqn, arrays)

    def function(*arrays: Any) -> list[Any]:
        return evaluate_in_float32(eqn.params["call_jaxpr"], arrays)

    def run(jaxpr: Any, arrays: Sequence[Any], _: Any) -> list[Any]:
        return evaluate_in_float32(jaxpr, arrays)

    return control_flow.custom_jvp(eqn, function, arrays, run, [None] * len(eqn.outvars))
