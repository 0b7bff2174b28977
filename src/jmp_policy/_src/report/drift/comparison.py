"""Compares a traced program with its float32 replay, in one compiled function.

Every value is a twin: what the program computes in half precision, and what it would be if every operation
were float32. An operation in half is done in float32 for the operands of either run, and of the first the
result is rounded::

    wide  = op(x.half, y.half)           # float32
    half  = narrowed(wide)               # what the operation introduces is half - wide
    exact = op(x.exact, y.exact)         # what it inherits is wide - exact

So the two parts add up to the whole error, element by element. Rounding once is what hardware does: products
accumulate in float32, and elementwise operations are computed there. What rounds more than once runs as it
was traced: sums in half, the sigmoid. Until the first rounding one run suffices.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.narrowing import narrowed
from jmp_policy._src.jaxpr import calls, compat, control_flow, ir, walk
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.compat import open_jaxpr
from jmp_policy._src.jaxpr.float32_replay import holds_half, is_foreign, replay_equation, rounds_in_steps
from jmp_policy._src.jaxpr.interpreter import Interpreter
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import Site, Walk
from jmp_policy._src.products.fp8.eligibility import formats_of
from jmp_policy._src.products.fp8.primitive import lost_in_float8
from jmp_policy._src.products.fp8.scales import is_of_float8
from jmp_policy._src.report.drift.recorder import LEAST, Errors, Measured, Node, Recorder, squares
from jmp_policy._src.report.drift.twins import Twin, TwinCarries, as_written, cond, held, same


class TwinEvaluation(Interpreter):
    """Evaluates jaxprs on twins.

    Args:
      recorder: takes note of the values that differ.
      written: of half constants that are other numbers in the source, those numbers, as of `LostConstants`.
      cast: of casts of arguments to half, the argument, as of `_uses_of_arguments`.
      masked: the equations whose results a softmax may hide, as of `_masked_by_softmax`.
      has_infinite: whether an infinite number stands in the program.
    """

    def __init__(
        self,
        recorder: Recorder,
        written: Mapping[tuple[int, int], float],
        cast: Mapping[int, int | None],
        masked: Set[int],
        has_infinite: bool,
    ):
        self.recorder, self._cast, self._written = recorder, cast, written
        self._masked, self._has_infinite = masked, has_infinite

    def at(self, eqn: Any, around: Site) -> Site:
        """The site of an operation."""
        return walk.site_of(eqn, around)

    def constant(self, atom: Any, value: Any) -> Twin:
        """A constant, which both runs share."""
        return same(jnp.asarray(value, ir.dtype_of(atom)) if isinstance(atom, compat.Literal) else value)

    def equation(self, eqn: Any, values: list[Twin], where: Site) -> Sequence[Twin]:
        """The results of an equation in both runs; what neither rounds nor differs is run once."""
        if is_of_float8(eqn):
            # The float32 run has no use for it: what it makes of the operands is the product's error.
            return list(map(same, as_written(eqn, values)))
        if all(twin.node is None for twin in values) and (calls.is_draw(eqn) or not holds_half(eqn)):
            return list(map(same, replay_equation(eqn, [twin.exact for twin in values])))
        return super().equation(eqn, values, where)

    def enters(self, eqn: Any, kind: Kind, values: list[Twin]) -> bool:
        """Whether it is looked into; else it is an operation as a whole."""
        if kind is Kind.COND:
            return compat.platforms_of_branches(eqn) is None and not ir.has_references(eqn)
        return kind is not Kind.WHILE

    def inside(
        self, jaxpr: Any, take: Callable[[], list[Twin]], where: Site
    ) -> tuple[list[Twin], dict[int, Measured]]:
        """Runs a jaxpr in a trace of its own; what is recorded is what was measured there."""
        outside, self.recorder.measured = self.recorder.measured, {}
        results, measured = self.run(jaxpr, take(), where), self.recorder.measured
        self.recorder.measured = outside
        return results, measured

    def of_trip(self, record: dict[int, Measured]) -> Any:
        """What is measured in a trip, as one array: a loop that fills hundreds of small ones is slow."""
        with jax.numpy_dtype_promotion("standard"):  # Of a program in float64 some are.
            array, apart = ravel_pytree(record)
        return array, jax.tree_util.Partial(apart)

    def over_devices(self, eqn: Any, record: dict[int, Measured]) -> dict[int, Measured]:
        """What is measured on all devices of a shard_map."""
        axes = compat.manual_axes(eqn.params)

        def whole(field: str, x: Any) -> Any:
            if x is None:
                return None
            # One that all devices have counts once, if arrays say over which axes they vary.
            varies = compat.varying(jax.typeof(x)) if eqn.params["check_vma"] else axes
            names = tuple(axis for axis in axes if axis in varies)
            return (lax.pmax if field == "largest" else lax.psum)(x, names) if names else x

        return {number: Measured(*map(whole, Measured._fields, values)) for number, values in record.items()}

    def keep(self, record: Any) -> None:
        """Keeps what was measured in a loop or on devices."""
        if isinstance(record, tuple):
            array, apart = record
            record = jax.vmap(apart)(array)
        self.recorder.measured.update(record)

    def checkpoint(self, eqn: Any, values: list[Twin], where: Site) -> Sequence[Twin]:
        """Runs what a jax.checkpoint holds, kept apart from what computed the same before."""
        # Else the compiler would merge what is computed again with the first time.
        return self.call(eqn, lax.optimization_barrier(values), where)

    def carries(self, eqn: Any, loop: control_flow.Loop, where: Site) -> TwinCarries:
        """Carries are nodes of their own."""
        return TwinCarries(self.recorder, eqn, loop.start, where)

    def cond(self, eqn: Any, values: list[Twin], where: Site) -> Sequence[Twin]:
        """Runs the branch of both runs, or that of each."""
        return cond(self, eqn, values, where)

    def operation(self, eqn: Any, values: list[Twin], where: Site) -> list[Twin]:
        """Does an operation in both runs, and measures what it introduces."""
        values = [self._as_written(eqn, place, twin, where) for place, twin in enumerate(values)]
        exact = replay_equation(eqn, [twin.exact for twin in values])
        differs = any(twin.node is not None for twin in values)
        computed = replay_equation(eqn, [twin.half for twin in values]) if differs else exact
        if _runs_as_traced(eqn):
            half, rounds = as_written(eqn, values), [True] * len(computed)
        else:
            dtypes = map(ir.dtype_of, eqn.outvars)
            rounds = [is_half(dtype) and not _is_exact(eqn, i, dtype) for i, dtype in enumerate(dtypes)]
            half = [
                narrowed(value, ir.dtype_of(var)) if rounding else value
                for value, var, rounding in zip(computed, eqn.outvars, rounds, strict=True)
            ]
        if not differs and not any(rounds):
            return list(map(same, exact))
        half = [held(value, var) for value, var in zip(half, eqn.outvars, strict=True)]
        lost = None if formats_of(eqn) is None else lost_in_float8(eqn, [twin.half for twin in values])
        rows = enumerate(zip(half, computed, exact, rounds, strict=True))
        return [self._result(eqn, where, values, i, row, lost) for i, row in rows]

    def _as_written(self, eqn: Any, place: int, twin: Twin, where: Site) -> Twin:
        """An operand; a constant that half precision made another number is the written one in float32."""
        number = self._written.get((id(eqn), place))
        if number is None or twin.node is not None:
            return twin
        var = eqn.invars[place]
        node = Node(where, eqn.primitive.name, ir.dtype_of(var), 1, (), rounds=True, adds=False)
        exact, half = jnp.full_like(twin.exact, number), held(twin.half, var)
        if eqn.primitive.name == "div":
            half = jnp.where(jnp.isinf(1 / half), 0, half)  # XLA multiplies by the reciprocal.
        return Twin(half, exact, self.recorder.add(node, half, exact, exact))

    def _result(
        self, eqn: Any, site: Site, twins: Sequence[Twin], i: int, row: tuple[Any, Any, Any, bool], lost: Any
    ) -> Twin:
        """One result of an operation with its node."""
        half, wide, exact, rounds = row
        passed = _passed_on(eqn, twins, i)
        if passed is not None and not rounds:
            return Twin(half, exact, passed)
        sources = tuple(dict.fromkeys(twin.node for twin in twins if twin.node is not None))
        var, name = eqn.outvars[i], eqn.primitive.name
        is_sum = name in _REDUCES and is_half(ir.dtype_of(var))
        terms = walk.size(eqn.invars[0]) // max(walk.size(var), 1) if is_sum else 1
        note, argument = _NOT_INSIDE.get(calls.kind_of(eqn), ""), self._cast.get(id(eqn))
        dtype, adds = _computed_in(eqn, var), name in _ADDS
        node = Node(site, name, dtype, terms, sources, rounds, adds, note, argument)
        seen = half, wide, exact
        is_masked = id(eqn) in self._masked
        if (is_masked or (self._has_infinite and name in _PASSING)) and jnp.issubdtype(dtype, jnp.floating):
            # What is infinite in both runs, as a mask is, has no error; a plain subtraction gives NaN.
            hidden = exact < _MASKED if is_masked else jnp.isinf(exact) & (half == exact)
            seen = tuple(jnp.where(hidden, 0, value) for value in seen)
        return Twin(half, exact, self.recorder.add(node, *seen, lost=lost, operands=twins))


def _runs_as_traced(eqn: Any) -> bool:
    """Whether only the operation itself knows how it rounds."""
    name = eqn.primitive.name
    if rounds_in_steps(eqn) or name == "reduce_precision" or formats_of(eqn) is not None:
        return True
    return (is_foreign(name) or bool(calls.inner_jaxprs(eqn))) and holds_half(eqn)


def _computed_in(eqn: Any, out: Any) -> Any:
    """The dtype that decides how exact an operation is: of a float8 product the coarser operand's."""
    formats = formats_of(eqn)
    if formats is None:
        return ir.dtype_of(out)
    return max(map(jnp.dtype, formats), key=lambda dtype: jnp.finfo(dtype).eps)


def _is_exact(eqn: Any, i: int, dtype: Any) -> bool:
    """Whether an operation gives a result of numbers that its half operands already were."""
    if eqn.primitive.name in _VIEWS:
        return ir.dtype_of(eqn.invars[_viewed(eqn, i)]) == dtype
    floating = [d for d in map(ir.dtype_of, eqn.invars) if d is not None and jnp.issubdtype(d, jnp.floating)]
    return eqn.primitive.name in _EXACT and all(d == dtype for d in floating)


def _viewed(eqn: Any, i: int) -> int:
    """Which operand a result is, its shape or dtype aside."""
    return i if len(eqn.invars) == len(eqn.outvars) else 0


def _passed_on(eqn: Any, twins: Sequence[Twin], i: int) -> int | None:
    """The node of the operand that a result is, its shape aside."""
    if eqn.primitive.name not in _VIEWS:
        return None
    place = _viewed(eqn, i)
    var, out = eqn.invars[place], eqn.outvars[i]
    is_number = all(jnp.issubdtype(ir.dtype_of(v), jnp.inexact) for v in (var, out))
    return twins[place].node if is_number and walk.size(var) == walk.size(out) else None


#: Of loops and branches that are done as one operation, why their row is of the whole.
_NOT_INSIDE: Mapping[Kind | None, str] = {
    Kind.WHILE: "what is inside is not looked at, since it may end at another time in float32",
    Kind.COND: "what is inside is not looked at, since it is for other platforms or writes to references",
}

_EXACT, _ADDS = HAVING[Trait.EXACT], HAVING[Trait.ADDS] | {"carry"}
_REDUCES = HAVING[Trait.REDUCES]

#: A softmax makes such numbers 0.
_MASKED = -1e3

_VIEWS = HAVING[Trait.VIEW] - {"reduce_precision"}
_ADDITIONS = HAVING[Trait.ADDITION]
_PASSING = _EXACT | _VIEWS | _ADDITIONS


class Compared(NamedTuple):
    """One result of a program, in both runs; each of shape ().

    Args:
      error: sum of the squared errors.
      exact, half: sums of the squares of both.
      largest: largest absolute error.
    """

    error: Any
    exact: Any
    half: Any
    largest: Any

    @property
    def cosine(self) -> Any:
        """The cosine of the angle between both runs, since |a - b|^2 is |a|^2 + |b|^2 - 2 ab."""
        return (self.exact + self.half - self.error) / (2 * (self.exact * self.half) ** 0.5)


def _uses_of_arguments(
    seen: Walk, dtypes: Sequence[Any]
) -> tuple[dict[int, int | None], dict[int, list[int]]]:
    """Finds casts of arguments to half, and half results that are an argument with something added to it.

    The latter are new parameters, and moving averages; of half arguments, also those that float32 adds up.

    Args:
      seen: the program.
      dtypes: of its arguments.

    Returns:
      By the identity of the equation of such a cast, the index of the argument, None if it has several; and
      by such a result the indices of arguments that this may be said of.
    """
    # The arguments that a value is, those that were added to, and by a number less an argument
    # (`new - params`) the argument.
    arguments, added, less = dict[int, int](), dict[int, list[int]](), dict[int, int]()
    cast = dict[int, int | None]()
    for eqn, _, operands, results in seen.operations:
        if not results:
            continue
        name, to_half = eqn.primitive.name, is_half(ir.dtype_of(eqn.outvars[0]))
        origins = [arguments.get(info.key, info.origin) for info in operands]
        known = [origin for origin in origins if origin is not None]
        if name == "convert_element_type" and known and to_half:
            # A jitted function that is called twice has one equation.
            one = cast.setdefault(id(eqn), known[0])
            cast[id(eqn)] = one if one == known[0] else None
        known = [origin for origin in known if to_half or is_half(dtypes[origin])]
        if name in _VIEWS or name == "select_n":
            for info in operands:
                if info.key in added:
                    added[results[0].key] = added[info.key]
                if info.key in less:
                    less[results[0].key] = less[info.key]
        if name == "sub" and origins[1] is not None:
            less[results[0].key] = origins[1]
        # Added to what it was taken from, a difference gives a number that is kept elsewhere.
        known = [origin for origin in known if origin not in map(less.get, [info.key for info in operands])]
        decays = name == "mul" and any(info.constant is not None for info in operands)
        if known and results[0].key not in added and (decays or name in _VIEWS):
            arguments[results[0].key] = known[0]
        elif known and name in _ADDITIONS:
            added[results[0].key] = known
    return cast, {i: added[info.key] for i, info in enumerate(seen.results) if info.key in added}


def _masked_by_softmax(seen: Walk) -> set[int]:
    """The identities of equations that make what a softmax is taken of, and masks that are added to it.

    Masks are large, and so is what rounding does to them, which a softmax does not see.
    """
    # By value, the one that it is but for its shape and dtype, and the one whose maximum it is.
    same, maximum, found, masked = dict[int, int](), dict[int, int](), set[int](), set[int]()
    for eqn, _, operands, results in seen.operations:
        name, keys = eqn.primitive.name, [same.get(info.key, info.key) for info in operands]
        for key in [info.key for info in results[:1]]:
            if name in _VIEWS:
                same[key] = keys[0]
            if name == "reduce_max":
                maximum[key] = keys[0]
            elif name in _EXACT and (of := [maximum[k] for k in keys if k in maximum]):
                maximum[key] = of[0]
            elif name == "sub" and maximum.get(keys[1]) == keys[0]:
                found.update([key, keys[0]])
    for eqn, _, operands, results in reversed(seen.operations):
        if found.intersection(same.get(info.key, info.key) for info in results):
            masked.add(id(eqn))
            if eqn.primitive.name in _ADDITIONS or eqn.primitive.name in ("select_n", "max"):
                found.update(same.get(info.key, info.key) for info in operands)
    return masked


def _is_infinite(eqn: Any) -> bool:
    """Whether an infinite number stands in an equation."""
    numbers = (atom for atom in eqn.invars if isinstance(atom, compat.Literal))
    return any(jnp.issubdtype(ir.dtype_of(a), jnp.floating) and np.isinf(float(a.val)) for a in numbers)


class Comparison:
    """The two runs of a program as a function of its arguments.

    Args:
      jaxpr: closed.
      measures: whether to measure at each operation, and not only the results.
      written: of half constants that are other numbers in the source, those numbers, as of `LostConstants`.
      quick: whether to measure in less time. Then `is_reliable` says whether it has to be done again without.

    Attributes:
      nodes: values at which the runs may differ; known once it was called, or traced.
      results: for each result of the program its node, or None where the runs cannot differ.
    """

    def __init__(
        self,
        jaxpr: Any,
        measures: bool,
        written: Mapping[tuple[int, int], float] = MappingProxyType({}),
        *,
        quick: bool = False,
    ):
        self._jaxpr = jaxpr
        types = [var.aval for var in open_jaxpr(jaxpr).invars]
        self._written, self._errors = written, Errors(quick)
        seen = Walk(jaxpr)
        self._cast, updated = _uses_of_arguments(seen, [aval.dtype for aval in types])
        self._masked = _masked_by_softmax(seen)
        self._has_infinite = any(map(_is_infinite, ir.equations(jaxpr)))
        halves = [is_half(ir.dtype_of(var)) for var in open_jaxpr(jaxpr).outvars]
        self._updated = {i: of for i, of in updated.items() if halves[i]}
        self.nodes: list[Node] = []
        self.results: list[int | None] = []
        self._measures = measures

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """What was measured, for each result and by node, the first result in float32, and changes.

        Changes are the sums of the squares of what float32 adds to arguments, by result.
        """
        outs, measured = self._run(arrays)
        compared = [self._compared(twin) for twin in outs]
        changes = {}
        for i, arguments in self._updated.items():
            exact, before = outs[i].exact, [arrays[index] for index in arguments]
            same_shape = [array for array in before if jnp.shape(array) == jnp.shape(exact)]
            found = [squares(self._errors.difference(exact, array)) for array in same_shape]
            if found:
                changes[i] = jnp.min(jnp.stack(found))
        return compared, measured, outs[0].exact if outs else None, changes

    def is_reliable(self, compared: Sequence[Compared], measured: Mapping[int, Measured]) -> bool:
        """Whether quick measurements, on the host, are those that slow ones would be."""
        finite = all(np.isfinite(found).all() for found in jax.tree.leaves((compared, measured)))
        # Trips of a loop are added up: gradients of the first ones may be next to nothing.
        exact = (np.sum(at.exact) for at in (*measured.values(), *compared) if at.exact is not None)
        return finite and not any(0 < x < LEAST for x in exact)

    def unit_of(self, number: int) -> float:
        """What the errors of a node are multiplied by when they are measured."""
        return self._errors.unit(self.nodes[number].site.backward)

    def _compared(self, twin: Twin) -> Compared:
        error = self._errors.difference(twin.half, twin.exact)
        half, exact = (squares(self._errors.finite(value)) for value in (twin.half, twin.exact))
        return Compared(squares(error), exact, half, jnp.max(jnp.abs(error), initial=0.0))

    def _run(self, arrays: Sequence[Any]) -> tuple[list[Twin], dict[int, Measured]]:
        recorder = Recorder(self._measures, self._errors)
        evaluation = TwinEvaluation(recorder, self._written, self._cast, self._masked, self._has_infinite)
        outs = evaluation.run(self._jaxpr, [same(array) for array in arrays], Site())
        self.nodes, self.results = recorder.nodes, [twin.node for twin in outs]
        used = _used(self.nodes, self.results)
        return outs, {number: found for number, found in recorder.measured.items() if number in used}


def _used(nodes: Sequence[Node], results: Sequence[int | None]) -> set[int]:
    """The nodes that results depend on."""
    used, ahead = set[int](), {number for number in results if number is not None}
    while ahead:
        used |= ahead
        ahead = {source for number in ahead for source in nodes[number].sources} - used
    return used


def carried_on(nodes: Sequence[Node]) -> set[int]:
    """The nodes that begin a carry, or are carried into the next trip."""
    return {source for node in nodes if node.operation == "carry" for source in node.sources}


def is_floating(node: Node) -> bool:
    """Whether the errors of a node are those of numbers: comparisons are right or wrong."""
    return jnp.issubdtype(node.dtype, jnp.inexact)


def group_of(node: Node) -> tuple[str, str, bool]:
    """The module that a node is in, or outside of modules its line; and whether that is the backward pass."""
    return node.site.path, "" if node.site.path else node.site.line, node.site.backward
