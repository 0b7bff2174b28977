"""Runs a program that was traced in half precision in float32, with a tap wherever it would round.

The dtypes that a program was traced in say where it rounds: what a policy keeps in float32 (normalisation
layers, small inputs, sums of `jnp.sum`) was traced so, and has no taps. Each tap counts for the module whose
code made the value:

- where a module's operation makes a half value, the value is rounded, and where another of its operations
  reads it, the cotangent is, unless the operation only moves numbers or its transpose does;
- where a module reads a half value of another one, it would round it itself if the other one were float32;
  where another one reads its values, their cotangents are rounded when they come in.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import calls, compat, ir, rebuild_control_flow
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.float32_replay import replay_equation, to_float32
from jmp_policy._src.jaxpr.op_table import Trait, having
from jmp_policy._src.jaxpr.walk import size
from jmp_policy._src.report.sensitivity import exact_operations
from jmp_policy._src.report.sensitivity.custom_derivatives import custom_jvp, custom_vjp
from jmp_policy._src.report.sensitivity.rounding_taps import Which

#: Operations whose operands may be broadcast along axes of size 1, which their transposes sum over.
_BROADCASTING = having(Trait.BROADCASTS)


class Taps(Protocol):
    """What is done where the program would round: `rounding_taps` counts, `rounding_switches` rounds."""

    def tap(self, which: Which, x: jax.Array, sink: Any) -> jax.Array:
        """Returns a value."""
        ...

    def tap_sum(self, transposable: Callable[[Any], Any], dtype: str, x: jax.Array, sink: Any) -> jax.Array:
        """Returns a linear function of x, whose transpose adds up."""
        ...


class Sink(NamedTuple):
    """Name of a sink.

    Args:
      group: what its rounding counts for.
      alone: whether it is rounded only because other modules compute in float32: what comes in and leaves.
    """

    group: str
    alone: bool


class Tapped:
    """Value of a running program.

    Args:
      array: as the module that made it sees it.
      group: what its rounding counts for; None for nothing.
      run: the program that it belongs to.
    """

    __slots__ = ("_read", "array", "group", "run")

    def __init__(self, array: Any, group: str | None, run: "TappedProgram"):
        self.array, self.group, self.run = array, group, run
        self._read: dict[Any, Any] = {}

    def outside(self) -> Any:
        """Returns the array as other modules see it."""
        return self._once("", self.array, self.group, False)

    def entering(self, group: str) -> Any:
        """Returns the array as another module sees it that computes with it in half."""
        return self._once(group, self.outside(), group, True)

    def _once(self, key: str, array: Any, group: str | None, value: bool) -> Any:
        if key not in self._read:
            self._read[key] = self.run.tapped(array, group, value, cotangent=True, alone=True)
        return self._read[key]


class TappedProgram:
    """One run.

    Args:
      group_of: function from the names of the scopes around an operation to what its rounding counts for;
        None for what is not asked about.
      sinks: what each tap is given.
      dtype: "float16" or "bfloat16".
      taps: what is done at each of them.
    """

    def __init__(
        self,
        group_of: Callable[[tuple[str, ...]], str | None],
        sinks: Mapping[Sink, Any],
        dtype: str,
        taps: Taps,
    ):
        self._group_of, self._sinks, self._dtype, self._taps = group_of, sinks, dtype, taps
        self.groups: dict[str, None] = {}

    def __call__(self, jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        """Returns the results of a closed jaxpr, in float32."""
        given = [Tapped(to_float32(array), None, self) for array in arrays]
        return [out.outside() for out in self._inside(jaxpr, given, ())]

    def tapped(self, array: Any, group: str | None, value: bool, cotangent: bool, alone: bool = False) -> Any:
        """Returns an array with a tap on it, if somebody asks about the group."""
        if not (value or cotangent) or not self._is_asked(group):
            return array
        return self._taps.tap(Which(value, cotangent, self._dtype), array, self._sinks[Sink(group, alone)])

    def _is_asked(self, group: str | None) -> TypeGuard[str]:
        if group is not None:
            self.groups[group] = None
        return group is not None and Sink(group, False) in self._sinks

    def _inside(self, jaxpr: Any, values: Sequence[Tapped], names: tuple[str, ...]) -> list[Tapped]:
        opened = compat.open_jaxpr(jaxpr)
        known: dict[Any, Tapped] = dict(zip(opened.invars, values, strict=True))
        for var, value in zip(opened.constvars, compat.constants(jaxpr), strict=True):
            known[var] = Tapped(to_float32(value), None, self)
        readers = _readers(opened, lambda eqn: self._group_of((*names, *compat.scopes(eqn))))

        def value_of(atom: Any) -> Tapped:
            if not isinstance(atom, compat.Literal):
                return known[atom]
            number = np.asarray(atom.val, ir.dtype_of(atom))
            return Tapped(to_float32(number), None, self)

        for eqn in opened.eqns:
            inner = (*names, *compat.scopes(eqn))
            operands = list(map(value_of, eqn.invars))
            with compat.eqn_context(eqn):
                results = self._equation(eqn, operands, inner, readers)
            known.update(zip(eqn.outvars, results, strict=True))
        return list(map(value_of, opened.outvars))

    def _equation(
        self, eqn: Any, operands: list[Tapped], names: tuple[str, ...], readers: Mapping[Any, Any]
    ) -> list[Tapped]:
        rule = _RULES.get(calls.kind_of(eqn))  # type: ignore[arg-type]
        if rule is not None and _holds_half(eqn):
            return rule(self, eqn, operands, names)
        called = calls.called(eqn)
        if called is not None and calls.kind_of(eqn) not in (Kind.CUSTOM_JVP, Kind.CUSTOM_VJP):
            return self._inside(called.jaxpr, operands[called.skipped :], names)
        group = self._group_of(names)
        arrays = [_read(value, atom, eqn, group) for value, atom in zip(operands, eqn.invars, strict=True)]
        if _adds_up_cotangents(eqn) and self._is_asked(group):
            outs = self._summed(eqn, arrays, group)
        elif _holds_half(eqn):
            outs = _OWN.get(eqn.primitive.name, replay_equation)(eqn, arrays)
        else:
            outs = compat.bind_primitive(eqn.primitive, arrays, eqn.params)
        return [self._made(eqn, var, out, group, readers) for var, out in zip(eqn.outvars, outs, strict=True)]

    def _made(self, eqn: Any, var: Any, array: Any, group: str | None, readers: Any) -> Tapped:
        """Returns a result of an operation."""
        if group is None or not is_half(ir.dtype_of(var)):
            return Tapped(array, None, self)
        forward = not exact_operations.keeps_values(eqn)
        own = [reader for reader, reader_group in readers.get(var, ()) if reader_group == group]
        backward = len(own) > 1 or any(map(exact_operations.rounds_cotangents, own))
        return Tapped(self.tapped(array, group, forward, backward), group, self)

    def _summed(self, eqn: Any, arrays: list[Any], group: str) -> list[Any]:
        """Runs an operation of which a transpose adds up half terms, with a tap on the sum."""
        sink = self._sinks[Sink(group, False)]
        if eqn.primitive.name not in _BROADCASTING:

            def moved(x: Any) -> Any:
                return compat.bind_primitive(eqn.primitive, [x, *arrays[1:]], eqn.params)[0]

            return [self._taps.tap_sum(moved, self._dtype, arrays[0], sink)]
        (result,) = eqn.outvars
        full = [
            self._taps.tap_sum(lambda x: ir.broadcast_like(x, result), self._dtype, array, sink)
            if _is_half_and_smaller(atom, result)
            else array
            for array, atom in zip(arrays, eqn.invars, strict=True)
        ]
        return compat.bind_primitive(eqn.primitive, full, eqn.params)

    def _flat(self, jaxpr: Any, names: tuple[str, ...], groups: Sequence[str | None], made: list[Any]) -> Any:
        """Returns a function of arrays that runs a jaxpr inside an operation."""

        def function(*arrays: Any) -> list[Any]:
            values = [Tapped(a, g, self) for a, g in zip(arrays, groups, strict=True)]
            outs = self._inside(jaxpr, values, names)
            made[:] = [out.group for out in outs]
            return [ir.as_array(out.array, atom) for out, atom in _results(jaxpr, outs)]

        return function

    def _scan(self, eqn: Any, operands: list[Tapped], names: tuple[str, ...]) -> list[Tapped]:
        made: list[str | None] = []
        groups = [value.group for value in operands]
        body = self._flat(eqn.params["jaxpr"], names, groups, made)
        arrays = [value.array for value in operands]
        outs = rebuild_control_flow.scan(eqn, body, arrays)
        return [Tapped(out, group, self) for out, group in zip(outs, made, strict=True)]

    def _cond(self, eqn: Any, operands: list[Tapped], names: tuple[str, ...]) -> list[Tapped]:
        made: list[str | None] = []
        groups = [value.group for value in operands[1:]]
        branches = [self._flat(branch, names, groups, made) for branch in eqn.params["branches"]]
        outs = rebuild_control_flow.cond(branches, [value.array for value in operands])
        return [Tapped(out, group, self) for out, group in zip(outs, made, strict=True)]

    def _checkpoint(self, eqn: Any, operands: list[Tapped], names: tuple[str, ...]) -> list[Tapped]:
        made: list[str | None] = []
        function = self._flat(eqn.params["jaxpr"], names, [value.group for value in operands], made)
        arrays = [value.array for value in operands]
        options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        outs = jax.checkpoint(function, **options)(*arrays)
        return [Tapped(out, group, self) for out, group in zip(outs, made, strict=True)]

    def _shard_map(self, eqn: Any, operands: list[Tapped], names: tuple[str, ...]) -> list[Tapped]:
        made: list[str | None] = []
        function = self._flat(eqn.params["jaxpr"], names, [value.group for value in operands], made)
        outs = rebuild_control_flow.shard_map(eqn, function, [value.array for value in operands])
        return [Tapped(out, group, self) for out, group in zip(outs, made, strict=True)]

    def _while(self, eqn: Any, operands: list[Tapped], names: tuple[str, ...]) -> list[Tapped]:
        """Runs a loop without taps: nothing differentiates it backward."""
        outs = replay_equation(eqn, [value.outside() for value in operands])
        return [Tapped(out, None, self) for out in outs]


def _results(jaxpr: Any, outs: Sequence[Tapped]) -> Any:
    return zip(outs, compat.open_jaxpr(jaxpr).outvars, strict=True)


def _read(value: Tapped, atom: Any, eqn: Any, group: str | None) -> Any:
    """Returns a value as an operation of a group reads it."""
    if value.group == group or not is_half(ir.dtype_of(atom)):
        return value.array
    if group is None or eqn.primitive.name == "convert_element_type":
        return value.outside()
    return value.entering(group)


def _readers(opened: Any, group_of: Callable[[Any], str | None]) -> dict[Any, list[Any]]:
    """Returns by half variable the operations of a jaxpr that read it, each with its group."""
    found: dict[Any, list[Any]] = {}
    for eqn in opened.eqns:
        half = [a for a in eqn.invars if not isinstance(a, compat.Literal) and is_half(ir.dtype_of(a))]
        for atom in half:
            found.setdefault(atom, []).append((eqn, group_of(eqn)))
    return found


def _adds_up_cotangents(eqn: Any) -> bool:
    """Returns whether a transpose of an operation adds up half terms: of a bias, of the rows of a table."""
    if eqn.primitive.name in ("gather", "broadcast_in_dim"):
        operand, result = eqn.invars[0], eqn.outvars[0]
        is_variable = not isinstance(operand, compat.Literal) and is_half(ir.dtype_of(operand))
        return is_variable and (eqn.primitive.name == "gather" or size(operand) < size(result))
    if eqn.primitive.name not in _BROADCASTING or len(eqn.outvars) != 1:
        return False
    return any(_is_half_and_smaller(atom, eqn.outvars[0]) for atom in eqn.invars)


def _is_half_and_smaller(atom: Any, result: Any) -> bool:
    is_variable = not isinstance(atom, compat.Literal) and is_half(ir.dtype_of(atom))
    return is_variable and size(atom) < size(result)


def _holds_half(eqn: Any) -> bool:
    """Returns whether an operation, or one inside it, has half operands or results."""
    atoms = (*eqn.invars, *eqn.outvars)
    return any(is_half(ir.dtype_of(atom)) for atom in atoms) or any(
        _holds_half(inner) for jaxpr in ir.subjaxprs(eqn) for inner in compat.open_jaxpr(jaxpr).eqns
    )


_OWN = {"custom_jvp_call": custom_jvp, "custom_vjp_call": custom_vjp}

_RULES: Mapping[Kind, Callable[..., list[Tapped]]] = {
    Kind.SCAN: TappedProgram._scan,
    Kind.COND: TappedProgram._cond,
    Kind.CHECKPOINT: TappedProgram._checkpoint,
    Kind.SHARD_MAP: TappedProgram._shard_map,
    Kind.WHILE: TappedProgram._while,
}
