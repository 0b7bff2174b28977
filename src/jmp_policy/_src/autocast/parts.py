"""Runs parts of a planned program as one function: softmaxes, elementwise operations of half values.

    h = x @ w                 # half
    t = tanh(h ** 3 + h)      # float32: its derivative would keep float32 arrays
    y = (t * h) @ v           # the product reads half

JAX keeps for the backward pass what the derivative of each operation needs: of a GELU in float32, six float32
arrays for one of float16. As one function it keeps its operands, and derives again from them, in float32:

    y     = half(f(float32(x)))
    dy    = half(f'(float32(x)) * float32(dx))     # computed again from x, under jax.checkpoint

Nothing is rounded that was not rounded before, so gradients have the errors that they would have had.

Grown from its result, an elementwise part takes in what makes its operands, as long as nobody else reads
that, until all its large operands are half. Those are then all that its derivative has to keep.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.autocast.operation_rules import is_summed
from jmp_policy._src.autocast.planner import CastCache, EqnPlan, How, Plan, Value
from jmp_policy._src.autocast.softmax import kept_normalized_exp, normalized_exp
from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.jaxpr import calls, compat, control_flow, ir, op_table
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.device_dispatch import has_known_sizes
from jmp_policy._src.jaxpr.ir import FLOAT32, evaluate
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.products import binding


@functools.lru_cache(maxsize=256)
def is_half(dtype: Any) -> bool:
    """Returns whether a dtype is one of those that autocast lowers to."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


class Uses:
    """The equations of a plan, by the variables that they make and read.

    Args:
      plan: its equations and their steps.
    """

    def __init__(self, plan: Plan):
        opened = compat.open_jaxpr(plan.jaxpr)
        self.eqns, self.steps = opened.eqns, plan.steps
        #: Variable -> the place of the equation that makes it; -> the places that read it, with the operand.
        self.made_at: dict[Any, int] = {}
        self.read_at: dict[Any, list[tuple[int, int]]] = {}
        self._held: dict[Any, Any] = {}
        #: What `half_of_all` said; those of plans that are inlined, by place.
        self._halves: dict[Any, np.dtype | None] = {}
        self._inlined: dict[int, Uses] = {}
        for var, value in zip(opened.invars, plan.ins, strict=True):
            self._held[var] = value.dtype
        for place, (eqn, step) in enumerate(zip(self.eqns, self.steps, strict=True)):
            for operand, atom in enumerate(eqn.invars):
                if not isinstance(atom, compat.Literal):
                    self.read_at.setdefault(atom, []).append((place, operand))
            for var, value in zip(eqn.outvars, step.outs, strict=True):
                self.made_at[var], self._held[var] = place, value.dtype
        self.returned = {atom for atom in opened.outvars if not isinstance(atom, compat.Literal)}

    def held(self, var: Any) -> Any:
        """Returns the dtype in which a variable is held."""
        return self._held.get(var, ir.dtype_of(var))

    def read_within(self, var: Any, places: Any) -> bool:
        """Returns whether all who read a variable are in some places."""
        return var not in self.returned and all(place in places for place, _ in self.read_at.get(var, ()))

    def half_of(self, var: Any, through_elementwise: bool = False) -> np.dtype | None:
        """Returns the half dtype in which a variable is held, or else everyone reads it, if there is one."""
        held = self.held(var)
        return held if is_half(held) else self.half_of_all(var, through_elementwise)

    def half_of_all(self, var: Any, through_elementwise: bool = False) -> np.dtype | None:
        """Returns the one half dtype in which everyone reads a variable, if there is one.

        Operations that only move it are looked through, and calls that are inlined.

        Args:
          var: the variable.
          through_elementwise: whether to look through operations in float32 whose results are rounded.
        """
        if var in self.returned or var not in self.read_at:
            return None
        key = var, through_elementwise
        if key not in self._halves:
            found = {self._half_read(*read, through_elementwise) for read in self.read_at[var]}
            self._halves[key] = found.pop() if len(found) == 1 else None
        return self._halves[key]

    def _half_read(self, place: int, operand: int, through_elementwise: bool) -> np.dtype | None:
        eqn, step = self.eqns[place], self.steps[place]
        name = eqn.primitive.name
        is_wide = through_elementwise and not is_half(step.reads[operand])
        if is_wide and is_elementwise(eqn, ir.shape_of(eqn.invars[operand])):
            return self.half_of_all(eqn.outvars[0], through_elementwise)
        if step.inner:
            if not control_flow.is_inlined(eqn):
                return None
            if place not in self._inlined:
                self._inlined[place] = Uses(step.inner[0])
            inside = self._inlined[place]
            inner = compat.open_jaxpr(step.inner[0].jaxpr).invars
            return inside.half_of_all(inner[operand], through_elementwise)
        if name == "convert_element_type":
            to = eqn.params["new_dtype"]
            return to if is_half(to) else self.half_of_all(eqn.outvars[0]) if to == ir.FLOAT32 else None
        if is_half(step.reads[operand]):
            return step.reads[operand]
        moves = name in op_table.MOVES and len(eqn.invars) == len(eqn.outvars) == 1 and not is_summed(eqn)
        is_moved = moves and ir.is_float32(eqn.outvars[0])
        return self.half_of_all(eqn.outvars[0], through_elementwise) if is_moved else None


_ELEMENTWISE = HAVING[Trait.ELEMENTWISE]

#: Operands with so many times fewer elements than the result may be float32: broadcast means, scales, biases.
_SMALLER = 8


def is_elementwise(eqn: Any, shape: Any) -> bool:
    """Returns whether an equation makes one array of this shape, element by element."""
    kind, name = calls.kind_of(eqn), eqn.primitive.name
    if len(eqn.outvars) != 1 or eqn.effects or not all(map(ir.is_plain_array, (*eqn.invars, *eqn.outvars))):
        return False
    out = eqn.outvars[0].aval
    if out.shape != shape or (out.dtype != FLOAT32 and out.dtype.kind not in "biu"):
        return False
    if kind is Kind.CUSTOM_JVP or (kind is Kind.JIT and control_flow.is_inlined(eqn)):
        called = calls.called(eqn)
        assert called is not None
        inner = compat.open_jaxpr(called.jaxpr)
        return not compat.constants(called.jaxpr) and all(map(_is_elementwise_inside, inner.eqns))
    is_cast = name == "convert_element_type" and eqn.params.get("sharding") is None
    return is_cast or name in _ELEMENTWISE


def _is_elementwise_inside(eqn: Any) -> bool:
    """Returns whether an equation may be in a function that is elementwise; of scalars, too."""
    if len(eqn.outvars) != 1 or not ir.is_plain_array(eqn.outvars[0]):
        return False
    return is_constant(eqn) or is_broadcast(eqn) or is_elementwise(eqn, ir.shape_of(eqn.outvars[0]))


def is_constant(eqn: Any) -> bool:
    """Returns whether an equation makes an array of numbers that stand in the program."""
    if not eqn.invars or [a for a in eqn.invars if not isinstance(a, compat.Literal)]:
        return False
    return len(eqn.outvars) == 1 and not eqn.effects and not ir.holds_jaxpr(eqn)


def is_broadcast(eqn: Any) -> bool:
    """Returns whether an equation copies a small array to a larger shape."""
    return eqn.primitive.name == "broadcast_in_dim" and is_smaller(eqn.invars[0], eqn.outvars[0])


def is_smaller(atom: Any, out: Any) -> bool:
    """Returns whether an operand has so few elements that it counts for nothing beside the result."""
    if isinstance(atom, compat.Literal):
        return True
    small, large = ir.shape_of(atom), ir.shape_of(out)
    return has_known_sizes((*small, *large)) and _SMALLER * math.prod(small) <= math.prod(large)


_NONLINEAR = HAVING[Trait.NONLINEAR]


class Part(NamedTuple):
    """Equations with one result that run as one; itself like an equation, and like a jaxpr.

    Args:
      places: of the equations in their program.
      eqns: the equations.
      invars: variables that others make.
      outvars: the one that others read.
      half: dtype of the result.
      is_softmax: whether it is exponentials over their sum, and not elementwise.
      constvars: none.
    """

    places: tuple[int, ...]
    eqns: tuple[Any, ...]
    invars: tuple[Any, ...]
    outvars: tuple[Any]
    half: np.dtype
    is_softmax: bool = False
    constvars: tuple[Any, ...] = ()


def elementwise_parts(uses: Uses, taken: set[int]) -> Iterator[Part]:
    """Yields the parts of a program; `taken` are places of equations that belong to others."""
    taken = set(taken)
    for place in reversed(range(len(uses.eqns))):
        part = None if place in taken else _part(uses, place, taken)
        if part is not None:
            taken.update(p for p in part.places if not is_constant(uses.eqns[p]))
            yield part


def _part(uses: Uses, last: int, taken: set[int]) -> Part | None:
    """Returns the part whose result the equation in a place makes."""
    out = uses.eqns[last].outvars[0] if uses.eqns[last].outvars else None
    if out is None or not _may_end(uses, last):
        return None
    half = uses.half_of(out)
    if half is None:
        return None
    places, inputs = _grown(uses, last, taken)
    if not all(_is_input(uses, var) for var in inputs) or not _is_worth_it(uses, places, inputs, out):
        return None
    in_order = tuple(sorted(places))
    return Part(in_order, tuple(uses.eqns[place] for place in in_order), tuple(inputs), (out,), half)


def _may_end(uses: Uses, place: int) -> bool:
    eqn, step = uses.eqns[place], uses.steps[place]
    out = eqn.outvars[0]
    sizes = ir.shape_of(out) if ir.is_float32(out) else ()
    # Of a number nothing is to be saved.
    is_sized = bool(sizes) and has_known_sizes(sizes)
    return is_sized and is_elementwise(eqn, sizes) and not _is_asked_half(step)


def _grown(uses: Uses, last: int, taken: set[int]) -> tuple[set[int], list[Any]]:
    """Returns the places of a part that ends in one, and its inputs."""
    shape = ir.shape_of(uses.eqns[last].outvars[0])
    places, read, waiting = set[int](), dict[Any, None](), {last}
    while waiting:
        # The last one is looked at first: all readers of what it makes have been.
        place = max(waiting)
        waiting.remove(place)
        if place == last or (place not in taken and _is_taken_in(uses, place, places, shape)):
            places.add(place)
            operands = [atom for atom in uses.eqns[place].invars if not isinstance(atom, compat.Literal)]
            read |= dict.fromkeys(operands)
            waiting |= {uses.made_at[var] for var in operands if var in uses.made_at}
    return places, [var for var in read if uses.made_at.get(var) not in places]


def _is_taken_in(uses: Uses, place: int, places: set[int], shape: Any) -> bool:
    """Returns whether a part takes in an equation that makes an operand of it."""
    eqn, step = uses.eqns[place], uses.steps[place]
    if is_constant(eqn):
        return True
    if _is_asked_half(step) or not uses.read_within(eqn.outvars[0], places):
        return False
    if is_broadcast(eqn):
        return ir.shape_of(eqn.outvars[0]) == shape
    if not is_elementwise(eqn, shape):
        return False
    whole = {a for a in eqn.invars if not isinstance(a, compat.Literal) and ir.shape_of(a) == shape}
    # What is half anyway only if that leaves as many operands to keep.
    return not is_half(uses.held(eqn.outvars[0])) or len(whole) == 1


def _is_asked_half(step: EqnPlan) -> bool:
    """Returns whether the caller wants an elementwise operation in half."""
    return step.region.lower or step.how is How.LOWERED


def _is_input(uses: Uses, var: Any) -> bool:
    """Returns whether an operand of a part is an array that is half or float32, or has no derivative."""
    dtype = uses.held(var)
    return ir.is_plain_array(var) and (is_half(dtype) or dtype == FLOAT32 or dtype.kind in "biu")


def _is_worth_it(uses: Uses, places: set[int], inputs: Sequence[Any], out: Any) -> bool:
    """Returns whether a part's operands are less than what its equations would keep, of that some float32."""
    kept: dict[Any, np.dtype] = {}
    for place in places:
        kept |= _kept(uses.steps[place])
    operands = [var for var in inputs if is_floating(uses.held(var)) and not is_smaller(var, out)]
    least = sum(uses.held(var).itemsize for var in operands)
    return FLOAT32 in kept.values() and least < sum(dtype.itemsize for dtype in kept.values())


def _kept(step: EqnPlan) -> dict[Any, np.dtype]:
    """Returns the variables that the derivative of an equation needs, with the dtypes they are read in."""
    eqn = step.eqn
    if step.inner:
        inside = [step for plan in step.inner for step in plan.steps]
        return {var: dtype for step in inside for var, dtype in _kept(step).items()}
    if eqn.primitive.name not in _NONLINEAR:
        return {}
    read = {
        atom: dtype
        for atom, dtype in zip(eqn.invars, step.reads, strict=True)
        if dtype is not None and not isinstance(atom, compat.Literal)
    }
    if eqn.primitive.name not in op_table.BROADCASTING:
        # Of the operand or the result one is enough.
        return dict.fromkeys(eqn.outvars, next(iter(read.values()))) if read else {}
    return {} if len(read) < 2 else {a: d for a, d in read.items() if not is_smaller(a, eqn.outvars[0])}


def softmax_parts(uses: Uses) -> Iterator[Part]:
    """Yields softmaxes whose float32 exponentials would be kept beside the half weights."""
    for place, eqn in enumerate(uses.eqns):
        if eqn.primitive.name == "div" and ir.is_float32(eqn.outvars[0]):
            places, half = _softmax(uses, place), uses.half_of(eqn.outvars[0], through_elementwise=True)
            if places is not None and half is not None:
                eqns = tuple(uses.eqns[place] for place in places)
                yield Part(places, eqns, tuple(eqns[0].invars), (eqn.outvars[0],), half, is_softmax=True)


def _softmax(uses: Uses, place: int) -> tuple[int, ...] | None:
    """Returns the places of a softmax that ends in a quotient: exp, sum, how that is broadcast, quotient."""
    quotient = uses.eqns[place]
    chain = [place]
    made = _made_by(uses, quotient.invars[1])
    while made is not None and uses.eqns[made].primitive.name in ("broadcast_in_dim", "reshape"):
        chain.append(made)
        made = _made_by(uses, uses.eqns[made].invars[0])
    if made is None or uses.eqns[made].primitive.name != "reduce_sum":
        return None
    sums, numerator = uses.eqns[made], quotient.invars[0]
    first = _made_by(uses, numerator)
    if first is None or uses.eqns[first].primitive.name != "exp":
        return None
    places = (first, made, *reversed(chain))
    inside = [var for p in places[:-1] for var in uses.eqns[p].outvars]
    if (
        sums.invars[0] is not numerator
        or isinstance(uses.eqns[first].invars[0], compat.Literal)
        or not all(ir.is_float32(var) and uses.read_within(var, set(places)) for var in inside)
        or any(is_half(uses.held(var)) for var in inside)
        or not _is_along(sums, quotient)
    ):
        return None
    return places


def _made_by(uses: Uses, atom: Any) -> int | None:
    return None if isinstance(atom, compat.Literal) else uses.made_at.get(atom)


def _is_along(sums: Any, quotient: Any) -> bool:
    """Returns whether each exponential is divided by the sum that it is in: the summed axes have size 1."""
    axes, shape = sums.params["axes"], ir.shape_of(quotient.outvars[0])
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return ir.shape_of(quotient.invars[0]) == shape and ir.shape_of(quotient.invars[1]) == kept


def join(plan: Plan) -> Sequence[EqnPlan]:
    """Returns the program of a plan, with its parts joined.

    Args:
      plan: of a whole jaxpr.
    """
    uses = Uses(plan)
    softmaxes = list(softmax_parts(uses))
    taken = {place for part in softmaxes for place in part.places}
    parts = [*softmaxes, *elementwise_parts(uses, taken)]
    joined = {part.places[-1]: _joined_step(uses, part) for part in parts}
    inside = {place for part in parts for place in part.places}
    read = {var for part in parts for var in part.invars}
    # A part has its own copy of what is made of numbers alone, which others may read as well.
    alone = {place for place in inside - joined.keys() if read & set(uses.eqns[place].outvars)}
    alone |= {p for p in inside - joined.keys() if not uses.read_within(uses.eqns[p].outvars[0], inside)}
    places = [p for p in range(len(uses.eqns)) if p in joined or p in alone or p not in inside]
    return [joined.get(place, uses.steps[place]) for place in places]


def _joined_step(uses: Uses, part: Part) -> EqnPlan:
    """Returns the step that does all equations of a part, at the place of the last."""
    reads = tuple(uses.held(var) if is_half(uses.held(var)) else None for var in part.invars)
    run, step = _run_softmax if part.is_softmax else _run_elementwise, uses.steps[part.places[-1]]
    return EqnPlan(part, reads, (Value(part.half),), step.why, run, region=step.region, at=step.eqn)


def _run_elementwise(step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
    """Does elementwise operations in float32, rounded once."""
    structure, is_kept = _structure(step.eqn), binding.is_derived_by_operation()
    function = kept_function(structure, step.outs[0].dtype, is_kept)
    return [CastCache(function(*step.operands(caches)))]


def _run_softmax(step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
    """Does a softmax in float32, rounded once."""
    axes = tuple(step.eqn.eqns[1].params["axes"])
    function = kept_normalized_exp if binding.is_derived_by_operation() else normalized_exp
    return [CastCache(function(step.outs[0].dtype, axes, True, caches[0].read(ir.FLOAT32)))]


@dataclasses.dataclass(frozen=True)
class _Structure:
    """Equations, equal to others that do the same: functions of them are made and traced once."""

    part: Part = dataclasses.field(compare=False)
    key: tuple[Any, ...]


def _structure(part: Part) -> _Structure:
    names: dict[Any, int] = {var: place for place, var in enumerate(part.invars)}
    key: list[Any] = [tuple(var.aval.dtype for var in part.invars)]
    for inner in part.eqns:
        operands = tuple(
            (str(ir.dtype_of(a)), np.asarray(a.val).tobytes()) if isinstance(a, compat.Literal) else names[a]
            for a in inner.invars
        )
        key.append((inner.primitive, compat.context_of(inner), tuple(inner.params.items()), operands))
        for var in inner.outvars:
            names[var] = len(names)
    return _Structure(part, tuple(key))


@functools.lru_cache(maxsize=512)
def kept_function(structure: _Structure, half: np.dtype, is_kept: bool) -> Callable[..., Any]:
    """Returns a function of the operands of a part, in whichever floating dtypes, to its result in half.

    The same one for parts that do the same: JAX traces and derives it once.

    Args:
      structure: the equations.
      half: dtype of the result.
      is_kept: whether JAX is to keep its derivative, for equal parts of a program that it derives as it runs.
    """
    part = structure.part

    def step(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return compat.bind_primitive(eqn.primitive, operands, eqn.params)

    def literal(atom: Any) -> Any:
        return np.asarray(atom.val, ir.dtype_of(atom))

    def in_float32(*arrays: Any) -> Any:
        wide = [
            jax.lax.convert_element_type(array, ir.dtype_of(var))
            for array, var in zip(arrays, part.invars, strict=True)
        ]
        (out,) = evaluate(part, wide, step, literal=literal)
        return jax.lax.convert_element_type(out, half)

    compute = jax.jit(in_float32, inline=compat.INLINED)
    function = jax.custom_jvp(lambda *arrays: compute(*arrays))

    @functools.cache
    def tangent_function(active: tuple[bool, ...]) -> Callable[..., Any]:
        def tangent(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            def of(*varied: Any) -> Any:
                given = iter(varied)
                return compute(*(next(given) if a else p for p, a in zip(primals, active, strict=True)))

            varied = [p for p, a in zip(primals, active, strict=True) if a]
            return jax.jvp(of, varied, list(tangents))[1]

        # Its operands are kept, and nothing that it computes. Without `prevent_cse` XLA shares what forward
        # and backward pass both compute, and keeps it in float32: 2.19 GB of temporary memory instead of 1.79
        # on an H100 (`python -m benchmarks autocast_gpu_cost`).
        return jax.checkpoint(tangent, prevent_cse=True)

    def rule(primals: Any, tangents: Any) -> Any:
        active = tuple(map(ir.is_array, tangents))
        out = compute(*primals)
        if not any(active):
            return out, jnp.zeros_like(out)
        return out, tangent_function(active)(primals, [t for t, a in zip(tangents, active, strict=True) if a])

    function.defjvp(rule, symbolic_zeros=True)
    return jax.jit(function, inline=compat.INLINED) if is_kept else function
