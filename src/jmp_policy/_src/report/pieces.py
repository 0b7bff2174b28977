"""Runs traced programs that are run a few times, in pieces of which equal ones are compiled once.

Compiling is most of what a report takes. A model repeats its layers, forward and backward, and what a report
adds to them repeats as well. So a program is cut, each piece is compiled as a function of the values that it
reads, and equal pieces are one executable, in later calls too::

    a b c d b c d b c d e    ->    a | b c d | b c d | b c d | e

Cuts lie where a hash of two operations in a row is the least around, so that what repeats is cut alike
wherever it stands. That is how tools for backups find the equal parts of files.

Every array is an argument of a piece, also those that a function closes over: it may have changed since.
`totals` takes several sums over arrays of one shape in one pass: one kernel to compile, not one for each.

References:
  Muthitacharoen, Chen, Mazieres, "A Low-bandwidth Network File System", 2001, section 3.1.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import calls, compat, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.compat import Literal
from jmp_policy._src.jaxpr.device_dispatch import FUNCTIONS
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import size

#: For a CPU. `drift`'s programs compile with these in a third of the time, and run two to five times as long
#: (jax 0.10.2; `python -m benchmarks drift_cost`). Small pieces take longer if compiled in parallel.
_QUICK: Any = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # Later ones have no other emitters.
    _QUICK["xla_cpu_use_fusion_emitters"] = False

#: What another executable takes beside what its operations take, in operations.
_FIXED_COST = 40

#: A loop over so many numbers is better compiled well: what is saved at each, over what a step takes longer.
_MANY = 1_000_000

#: Of a sum of half numbers, where what it loses depends on how it is compiled.
_MANY_TERMS = 16

#: Cuts that are tried: how many operations around one may not have a smaller hash, and factors on hashes.
_REACHES, _FACTORS = (8, 16, 32, 64), (1, 2654435761, 2246822519, 3266489917)


def compiled_quickly(run: Callable[..., Any], runs: int = 1) -> Callable[..., Any]:
    """A function that is traced once, and compiled for a few runs: less optimised and sooner done.

    Args:
      run: a function of pytrees of arrays, of the same types in every call.
      runs: how often it will be called.
    """
    traced: list[Any] = []

    def called(*args: Any) -> Any:
        if not traced:
            # A function of its own: JAX would look up the trace of an earlier call.
            closed, shapes = jax.make_jaxpr(lambda *args: run(*args), return_shape=True)(*args)
            traced.extend((Pieces(closed, runs), jax.tree.structure(shapes)))
        pieces, structure = traced
        return jax.tree.unflatten(structure, pieces(jax.tree.leaves(args)))

    return called


class _Step(NamedTuple):
    """An equation whose variables are numbers, those of the program's values."""

    eqn: Any
    operands: list[Any]
    results: list[int]

    def reads(self) -> list[int]:
        """The values among its operands; the others are numbers that stand in the program."""
        return [number for number in self.operands if not isinstance(number, Literal)]


class _Piece:
    """Some steps in a row; equal to others that do the same with their inputs.

    Args:
      steps: what is done.
      needed: function from the number of a value to whether what comes later reads it.
      options: for the compiler.
    """

    def __init__(
        self, steps: Sequence[_Step], needed: Callable[[int], bool], options: tuple[tuple[str, Any], ...]
    ):
        made = {number for step in steps for number in step.results}
        read = dict.fromkeys(number for step in steps for number in step.reads())
        self.steps, self.options = steps, options
        self.inputs = [number for number in read if number not in made]
        self.outputs = [number for number in sorted(made) if needed(number)]
        self._form = (options, _form(self.inputs, steps, self.outputs))
        self._hash = hash(self._form)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Piece) and self._form == other._form

    def run(self, *arrays: Any, bind: Callable[..., Any] = compat.bind_primitive) -> list[Any]:
        """The outputs for the inputs; `bind` does an operation."""
        known = dict(zip(self.inputs, arrays, strict=True))
        for eqn, operands, results in self.steps:
            values = [n.val if isinstance(n, Literal) else known[n] for n in operands]
            with compat.eqn_context(eqn):
                outs = bind(eqn.primitive, values, eqn.params)
            known.update(zip(results, outs, strict=True))
        return [known[number] for number in self.outputs]

    def function(self) -> Callable[..., list[Any]]:
        """What runs it: NumPy, in one process on a CPU, if its operations have such a way; else a program."""
        is_here = jax.default_backend() == "cpu" and jax.process_count() == 1
        if is_here and all(FUNCTIONS.get(step.eqn.primitive) for step in self.steps):
            return functools.partial(self.run, bind=_done_on_host)
        return _compiled(self)


def _done_on_host(primitive: Any, values: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    function = FUNCTIONS[primitive]
    assert function is not None
    return function(*values, **params)


@functools.lru_cache(maxsize=256)
def _compiled(piece: _Piece) -> Any:
    return jax.jit(piece.run, compiler_options=dict(piece.options) or None)


def clear() -> None:
    """Forgets what was compiled."""
    _compiled.cache_clear()


class Pieces:
    """A traced program in pieces, as a function of a list of its arrays.

    Args:
      closed: the closed jaxpr.
      runs: how often it will be called.
      every_rounding: whether XLA keeps casts to half precision that lie between two operations in float32.

    Attributes:
      pieces: functions, each with the numbers of the values that it reads and makes, and of those that
        nobody reads after it.
    """

    def __init__(self, closed: Any, runs: int = 1, every_rounding: bool = False):
        steps, self._known, self._arguments, self._outs = _numbered(closed)
        work = [_work(step.eqn) * runs for step in steps]
        cuts = sorted({0, len(steps)}) if closed.effects else _cuts(steps, work)
        last = {number: place for place, step in enumerate(steps) for number in step.reads()}
        last.update((n, len(steps)) for n in self._outs if not isinstance(n, Literal))
        self.pieces = []
        for start, stop in itertools.pairwise(cuts):
            needed = lambda n, stop=stop: last.get(n, -1) >= stop  # noqa: E731
            options = _options(steps[start:stop], sum(work[start:stop]), every_rounding)
            piece = _Piece(steps[start:stop], needed, options)
            done = [n for n in piece.inputs if not needed(n)]
            self.pieces.append((piece.function(), piece.inputs, piece.outputs, done))

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        known = self._known | dict(zip(self._arguments, arrays, strict=True))
        del arrays
        for run, inputs, outputs, done in self.pieces:
            values = [known[number] for number in inputs]
            for number in done:
                del known[number]
            known.update(zip(outputs, run(*values), strict=True))
        return [ir.as_array(n.val, n) if isinstance(n, Literal) else known[n] for n in self._outs]


def _numbered(closed: Any) -> tuple[list[_Step], dict[int, Any], list[int], list[Any]]:
    """The steps of a program without calls, its constants, and the numbers of its arguments and results."""
    steps, constants, numbers = list[_Step](), dict[int, Any](), itertools.count()

    def constant(_: Any, value: Any) -> int:
        constants[number := next(numbers)] = value
        return number

    def inline(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
        return ir.evaluate(jaxpr, arguments, step, constant=constant, literal=lambda atom: atom)

    def step(eqn: Any, operands: list[Any]) -> list[Any]:
        if (called := _inlined(eqn)) is not None:
            return inline(called, operands)
        if eqn.primitive.name == "stop_gradient":
            return operands
        steps.append(_Step(eqn, operands, [next(numbers) for _ in eqn.outvars]))
        return steps[-1].results

    arguments = [next(numbers) for _ in compat.open_jaxpr(closed).invars]
    outs = inline(closed, arguments)
    return _needed(steps, outs), constants, arguments, outs


def _needed(steps: Sequence[_Step], outs: Sequence[Any]) -> list[_Step]:
    """The steps that results depend on, or that have side effects."""
    wanted = {n for n in outs if not isinstance(n, Literal)}
    found = []
    for step in reversed(steps):
        if step.eqn.effects or not wanted.isdisjoint(step.results):
            wanted.update(step.reads())
            found.append(step)
    return found[::-1]


def _inlined(eqn: Any) -> Any:
    """The jaxpr that takes the place of an operation; None if the operation stays."""
    called = calls.called(eqn) if calls.kind_of(eqn) in _CALLS else None
    return None if called is None or calls.is_bound(eqn) else called.jaxpr


#: Nothing differentiates the program any more, so that own derivatives do not matter.
_CALLS = (Kind.JIT, Kind.CALL, Kind.CUSTOM_JVP, Kind.CUSTOM_VJP)


def _form(inputs: Sequence[Any], rows: Any, outputs: Sequence[Any]) -> Hashable:
    """What two pieces of a program have in common that do the same: all but the names of variables.

    Args:
      inputs: variables.
      rows: equations, with the variables or literals that they read, and the variables that they make.
      outputs: variables or literals.
    """
    places: dict[Any, Any] = {variable: place for place, variable in enumerate(inputs)}

    def read(atom: Any) -> Hashable:
        if isinstance(atom, Literal):
            # By bytes: 0.0 equals -0.0.
            return atom.aval, np.asarray(atom.val).tobytes()
        return places[atom]

    found = []
    for eqn, operands, results in rows:
        found.append((
            eqn.primitive,
            compat.context_of(eqn),
            tuple((read(atom), var.aval) for atom, var in zip(operands, eqn.invars, strict=True)),
            tuple(var.aval for var in eqn.outvars),
            _value_form(eqn.params if (called := _inlined(eqn)) is None else called),
        ))  # fmt: skip
        places.update(zip(results, range(len(places), len(places) + len(results)), strict=True))
    return tuple(found), tuple(map(read, outputs))


def _value_form(value: Any) -> Hashable:
    """A parameter as something to compare: by value where it cannot change, else equal to nothing."""
    if isinstance(value, dict):
        return tuple((name, _value_form(value[name])) for name in sorted(value, key=str))
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_value_form, value))
    if isinstance(value, bool | int | float | complex | np.generic):
        return type(value), repr(value)
    opened = compat.open_jaxpr(value)
    if hasattr(opened, "eqns"):
        rows = ((eqn, eqn.invars, eqn.outvars) for eqn in opened.eqns)
        inputs = [*opened.constvars, *opened.invars]
        # Constants in there are part of the executable, and a NumPy array may have changed since.
        own = object() if len(compat.constants(value)) else None
        return own, tuple(var.aval for var in inputs), _form(inputs, rows, opened.outvars)
    try:
        hash(value)
    except TypeError:
        return object()
    return value


def _options(steps: Sequence[_Step], work: int, every_rounding: bool) -> tuple[tuple[str, Any], ...]:
    """For the compiler: what it may leave out, and whether it keeps casts that XLA could leave out."""
    options = dict[str, Any]()
    if jax.default_backend() == "cpu" and not any(_adds_many(step.eqn) for step in steps):
        options |= _QUICK
        if work // len(steps) > _MANY:
            options["xla_backend_optimization_level"] = 1
    if every_rounding:
        options["xla_allow_excess_precision"] = False
    return tuple(options.items())


def _adds_many(eqn: Any) -> bool:
    """Whether it adds many half numbers; XLA does so in several sums at a time, and with `_QUICK` in one."""
    if any(_adds_many(inner) for jaxpr in ir.subjaxprs(eqn) for inner in compat.open_jaxpr(jaxpr).eqns):
        return True
    if eqn.primitive.name not in HAVING[Trait.REDUCES] or not is_half(ir.dtype_of(eqn.outvars[0])):
        return False
    return size(eqn.invars[0]) > _MANY_TERMS * size(eqn.outvars[0])


def _work(eqn: Any) -> int:
    """The numbers that the loop of an operation takes; products of matrices are calls of a library.

    In a jaxpr inside, that of an operation in the mean, times the trips of a scan.
    """
    inside = [_work(inner) for jaxpr in ir.subjaxprs(eqn) for inner in compat.open_jaxpr(jaxpr).eqns]
    if inside:
        return eqn.params.get("length", 1) * sum(inside) // len(inside)
    numbers = max(map(size, eqn.outvars), default=0)
    if eqn.primitive.name == _CONVOLUTION:
        kernel = eqn.invars[1]
        numbers *= size(kernel) // ir.shape_of(kernel)[eqn.params["dimension_numbers"].rhs_spec[0]]
    return numbers


def _cuts(steps: Sequence[_Step], work: Sequence[int]) -> list[int]:
    """Where to cut, the end included: where the least has to be compiled, of what is tried.

    What is a program of its own is a piece of its own, and so are convolutions that are long loops, and long
    sums of half numbers: those are compiled well.
    """
    avals = (tuple(v.aval for v in (*step.eqn.invars, *step.eqn.outvars)) for step in steps)
    hashes = np.array([_hash(step.eqn.primitive, a) for step, a in zip(steps, avals, strict=True)], np.uint64)
    pairs = hashes * np.uint64(31) + np.concatenate([hashes[:1], hashes[:-1]])
    tried = [[0, len(steps)]]
    for factor, reach in itertools.product(_FACTORS, _REACHES):
        if len(steps) > 2 * reach:
            mixed = (pairs * np.uint64(factor)) >> np.uint64(7) & np.uint64(0xFFFFFFFF)
            padded = np.pad(mixed, reach, constant_values=np.iinfo(np.uint64).max)
            least = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1).min(-1)
            tried.append(sorted({0, *np.flatnonzero(mixed == least).tolist(), len(steps)}))

    def cost(cuts: Sequence[int]) -> int:
        distinct = {hashes[start:stop].tobytes() for start, stop in itertools.pairwise(cuts)}
        return sum(_FIXED_COST + len(piece) // hashes.itemsize for piece in distinct)

    alone = [place for place, step in enumerate(steps) if _is_alone(step.eqn, work[place])]
    return sorted({*min(tried, key=cost), *alone, *(place + 1 for place in alone)})


def _is_alone(eqn: Any, work: int) -> bool:
    if eqn.primitive.name == _CONVOLUTION:
        return work > _FIXED_COST * _MANY
    is_program = sum(len(inner.eqns) for inner in ir.subjaxprs(eqn)) > _FIXED_COST
    return eqn.primitive in FUNCTIONS or is_program or _adds_many(eqn)


_CONVOLUTION = "conv_general_dilated"


@functools.lru_cache(maxsize=4096)
def _hash(primitive: Any, avals: Any) -> int:
    """The same for operations that may be the same, in every process."""
    return zlib.crc32(f"{primitive} {avals}".encode())


def totals(arrays: Sequence[Any], magnitude: Any = None) -> list[Any]:
    """The sum over each array, and the largest of magnitudes.

    Args:
      arrays: real, of one shape or of shape ().
      magnitude: another array, of numbers that are not negative; None for none.

    Returns:
      Scalars, the largest magnitude last; in the widest dtype of all arrays.
    """
    terms = [*arrays] if magnitude is None else [*arrays, magnitude]
    if not terms:
        return []
    if max(x.size for x in terms) > _LONG:
        return [*map(_total, arrays), *([] if magnitude is None else [jnp.max(magnitude, initial=0)])]
    terms = list(jnp.broadcast_arrays(*(x.astype(jnp.result_type(*terms)) for x in terms)))
    join = _added if magnitude is None else _added_but_the_last
    if terms[0].ndim:
        zeros = tuple(np.zeros((), x.dtype) for x in terms)
        terms = list(lax.reduce(tuple(terms), zeros, join, range(terms[0].ndim)))
    return terms


#: XLA adds up one sum in parts, several one number after the other: 2**25 ones in float32 would be 2**24.
_LONG = 2**16


def _total(x: Any) -> Any:
    return jnp.sum(jnp.sum(x, range(x.ndim - 1)))


def _added(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(lax.add, x, y))


def _added_but_the_last(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
    return (*map(lax.add, x[:-1], y[:-1]), lax.max(x[-1], y[-1]))
