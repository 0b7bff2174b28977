"""Plans which operation of a jaxpr runs in which dtype.

An abstract run over dtypes, never over arrays, in two passes. The first one goes backward and asks of every
value what the code behind it demands: True where every use runs in float32 or doesn't mind, False where some
use takes half. The second goes forward and decides the dtypes of each operation's operands and results, from
what its operands are and what is demanded of its results::

    y = x @ w            # demanded in float32 alone: half operands, and a float32 result
    z = y * y            # demanded in float32 alone: computed in float32, where 300 * 300 is finite
    s = reduce_sum(z)    # on the list "full": demands float32 of z
    h = (x @ v) @ u      # the inner product is demanded by another product: half operands, a half result

Without the first pass the product would hand `y` on in half, and the squares would overflow. Both passes are
memoised, so that equal parts of a program (the layers of a model) are planned once, and fixed points of loops
cost nothing at run time.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.jaxpr import calls, compat, ir, source_lines
from jmp_policy._src.jaxpr.ir import FLOAT32, evaluate
from jmp_policy._src.policy.marked_regions import Region, Regions
from jmp_policy._src.products import binding

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
    """

    __slots__ = ("_dtype", "_made", "_make")

    def __init__(self, value: Any, dtype: Any = None, make: Callable[[Any], Any] | None = None):
        self._dtype = getattr(value, "dtype", None) if dtype is None else dtype
        self._make = make
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
            self._made[dtype] = self._make(dtype) if self._make else cast(self._made[self._dtype], dtype)
        return self._made[dtype]


def cast(value: Any, dtype: Any) -> Any:
    """Casts an array."""
    return value if value.dtype == dtype else binding.converted(value, dtype)


#: What the code behind a value wants: False half (some use), True float32 (every use that doesn't mind), None
#: that nobody uses it.
Demand: TypeAlias = bool | None


_OUTSIDE = Region(None)


class How(enum.Enum):
    """How a step is done, where its dtypes do not say it. Values are shown to users."""

    AS_PLANNED = ""
    #: Moves a parameter or a constant, which is cast before it is moved.
    MOVED = "moved, in the dtype of each use"
    #: As the lists or the caller say: in half.
    LOWERED = "lower"


def rebound(step: "EqnPlan", caches: Sequence[CastCache]) -> list[CastCache]:
    """Does the operation itself, with its own parameters, on operands in the planned dtypes."""
    return as_planned(step, binding.bind(step.eqn, *step.operands(caches)))


def as_planned(step: "EqnPlan", outs: Sequence[Any]) -> list[CastCache]:
    """Returns the results of an operation in the dtypes they were planned in."""
    results = zip(outs, step.outs, step.eqn.outvars, strict=True)
    return [CastCache(cast(out, v.dtype) if ir.is_float32(var) else out) for out, v, var in results]


@dataclasses.dataclass
class EqnPlan:
    """What is done with one operation.

    Args:
      eqn: the equation.
      reads: dtype per operand; None for operands that are taken as they are.
      outs: what its results will be.
      why: which rule decided, as it is shown.
      run: does it; here the operation itself, in the dtypes that were planned.
      inner: plans of the jaxprs inside.
      region: the region it is in.
      note: what the user should know, or "".
      at: the equation on whose behalf it runs, if not `eqn`.
      is_rewritten: whether other operations give the result or its derivative, whatever the dtypes.
      how: what more there is to know to run it.
    """

    eqn: Any
    reads: tuple[np.dtype | None, ...]
    outs: tuple[Value, ...]
    why: str
    run: "Run" = rebound
    inner: "tuple[Plan, ...]" = ()
    region: Region = _OUTSIDE
    note: str = ""
    at: Any = None
    is_rewritten: bool = False
    how: How = How.AS_PLANNED

    @property
    def is_unchanged(self) -> bool:
        """Returns whether the operation runs as it was traced, from values as they were traced."""
        is_float32 = all(d is None or d == FLOAT32 for d in (*self.reads, *self.dtypes))
        return not self.is_rewritten and is_float32 and all(plan.is_unchanged for plan in self.inner)

    @property
    def dtypes(self) -> tuple[Any, ...]:
        """The dtype of each result; None for those that autocast leaves alone."""
        return planned_dtypes(self.outs, self.eqn.outvars)

    def operands(self, caches: Sequence[CastCache]) -> list[Any]:
        """The operands in the dtypes that they are read in."""
        return [cache.read(dtype) for cache, dtype in zip(caches, self.reads, strict=True)]


#: Does a step, with its operands.
Run: TypeAlias = Callable[[EqnPlan, Sequence[CastCache]], Sequence[CastCache]]


@dataclasses.dataclass
class Plan:
    """What is done with a jaxpr.

    Args:
      jaxpr: closed or not.
      ins: what its arguments are.
      steps: one per equation.
      outs: what its results are.
      program: the steps that are run, of which one may do several equations.
      is_unchanged: whether everything runs as it was traced.
      traced: jaxprs that were made of the plan, by the dtypes of their results.
    """

    jaxpr: Any
    ins: tuple[Value, ...]
    steps: list[EqnPlan]
    outs: tuple[Value, ...]
    program: Sequence[EqnPlan]
    is_unchanged: bool
    traced: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def run(self, caches: Sequence[CastCache]) -> list[CastCache]:
        """Runs the operations, on behalf of the lines of code they come from; casts are kept in `caches`."""
        steps = iter(self.program)

        def step(eqn: Any, operands: list[CastCache]) -> Sequence[CastCache]:
            planned = next(steps)
            with compat.eqn_context(planned.at or eqn):
                return planned.run(planned, operands)

        return evaluate(
            self.jaxpr,
            caches,
            step,
            constant=_constant,
            literal=_literal,
            eqns=[step.eqn for step in self.program],
        )

    def results(self, arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
        """The results for some arguments, in dtypes; None for results as they come."""
        caches = self.run(list(map(CastCache, arrays)))
        return [cache.read(dtype) for cache, dtype in zip(caches, dtypes, strict=True)]

    def as_function(self, dtypes: Sequence[np.dtype | None]) -> Callable[..., list[Any]]:
        """A function of arrays in the dtypes that it was planned for; `dtypes` as for `results`."""

        def function(*arrays: Any) -> list[Any]:
            with binding.program(is_body=True):
                return self.results(arrays, dtypes)

        return function

    def traced_as(self, dtypes: tuple[Any, ...]) -> Any:
        """Its jaxpr; the same object each time, so that it is compiled once. `dtypes` as for `results`."""
        if dtypes not in self.traced:
            atoms = compat.open_jaxpr(self.jaxpr).invars
            held = zip(atoms, planned_dtypes(self.ins, atoms), strict=True)
            types = [a.aval if d in (None, FLOAT32) else ir.retyped(a.aval, d) for a, d in held]
            self.traced[dtypes] = jax.make_jaxpr(self.as_function(dtypes))(*types)
        return self.traced[dtypes]


class Case(NamedTuple):
    """An operation, where it is planned.

    Args:
      planner: plans what is inside.
      eqn: the operation.
      ins: what its operands are; unknown while it is asked what it demands of them.
      outs: what is wanted of its results.
      region: the region it is in.
    """

    planner: "Planner"
    eqn: Any
    ins: Sequence[Value]
    outs: Sequence[Demand]
    region: Region

    @property
    def are_float32(self) -> list[bool]:
        """Whether each operand is a float32 array, as it was traced."""
        return [ir.is_float32(atom) for atom in self.eqn.invars]

    def planned(
        self, reads: Any, results: Any, why: str, run: Run = rebound, how: How = How.AS_PLANNED
    ) -> EqnPlan:
        """What is done with the operation where float32 operands, and results, get one dtype each."""
        operands = tuple([reads if is_float else None for is_float in self.are_float32])
        outs = [Value(results) if ir.is_float32(var) else traced(var) for var in self.eqn.outvars]
        return EqnPlan(self.eqn, operands, tuple(outs), why, run, how=how)

    def as_traced(self, why: str, note: str = "") -> EqnPlan:
        """What is done with the operation in the dtypes that it was traced in."""
        return as_traced(self.eqn, why, note)


def as_traced(eqn: Any, why: str, note: str = "") -> EqnPlan:
    """The step of an operation in its traced dtypes."""
    reads = tuple([FLOAT32 if ir.is_float32(atom) else None for atom in eqn.invars])
    return EqnPlan(eqn, reads, tuple(map(traced, eqn.outvars)), why, note=note)


class Rule:
    """What autocast does with one kind of operation."""

    def demand(self, case: Case) -> Sequence[Demand]:
        """Returns what it wants of each operand, given what is wanted of its results: here float32."""
        return [True] * len(case.eqn.invars)

    def plan(self, case: Case) -> EqnPlan:
        """Returns what is to be done."""
        raise NotImplementedError


@dataclasses.dataclass
class Demands:
    """What is wanted of a jaxpr's arguments and variables."""

    jaxpr: Any
    ins: tuple[Demand, ...]
    of: dict[Any, Demand]


@dataclasses.dataclass(eq=False)
class Planner:
    """Plans jaxprs under one setting of lists, rules and regions.

    Args:
      regions: reads name stacks.
      rules: primitive's name -> rule.
      table: primitive's name -> (list, reason).
      otherwise: the rule of all other primitives.
      join: gives the program of a plan, in which one step may do several equations.

    Attributes:
      met: names of the primitives met.
      notes: what the user should know -> the line where it is.
    """

    regions: Regions
    rules: Mapping[str, Rule]
    table: Mapping[str, tuple[str, str]]
    otherwise: Rule
    join: "Join"
    met: set[str] = dataclasses.field(default_factory=set)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    # By identity, with the jaxpr kept alive in the entry.
    _demands: dict[Any, Demands] = dataclasses.field(default_factory=dict)
    _plans: dict[Any, Plan] = dataclasses.field(default_factory=dict)
    #: The same, by name stack: equations of one call of a function share it.
    _regions: dict[Any, tuple[Any, Region]] = dataclasses.field(default_factory=dict)

    def rule(self, eqn: Any, region: Region) -> Rule:
        """Returns the rule of an operation; where autocast is off only those that hold others have one."""
        name = eqn.primitive.name
        is_off = region.half is None and name not in calls.KINDS
        return self.otherwise if is_off else self.rules.get(name, self.otherwise)

    def region_of(self, eqn: Any, around: Region) -> Region:
        """Returns the region of an equation of a jaxpr that is in another one."""
        stack = compat.stack_of(eqn)
        known = self._regions.get((id(stack), around))
        if known is None:
            known = stack, self.regions.enter(around, compat.scopes(eqn))
            self._regions[id(stack), around] = known
        return known[1]

    def demands(self, jaxpr: Any, outs: Sequence[Demand], region: Region) -> Demands:
        """Looks ahead: from what is wanted of a jaxpr's results to what is wanted of all its values."""
        key = (id(jaxpr), tuple(outs), region)
        if key not in self._demands:
            self._demands[key] = self._look_ahead(jaxpr, outs, region)
        return self._demands[key]

    def _look_ahead(self, jaxpr: Any, outs: Sequence[Demand], region: Region) -> Demands:
        opened = compat.open_jaxpr(jaxpr)
        of: dict[Any, Demand] = {}

        def add(atom: Any, demand: Demand) -> None:
            if demand is not None and not isinstance(atom, compat.Literal):
                of[atom] = demand and of.get(atom, True)

        for atom, demand in zip(opened.outvars, outs, strict=True):
            add(atom, demand)
        for eqn in reversed(opened.eqns):
            used = [of.get(var) for var in eqn.outvars]
            if all(demand is None for demand in used) and not eqn.effects:
                continue  # Dead code: what it wants doesn't count.
            inside = self.region_of(eqn, region)
            demands = self.rule(eqn, inside).demand(Case(self, eqn, (), used, inside))
            for atom, demand in zip(eqn.invars, demands, strict=True):
                # An index, a key: used, and nothing to choose.
                add(atom, demand if ir.is_float32(atom) else True)
        return Demands(jaxpr, tuple(of.get(var) for var in opened.invars), of)

    def plan(self, jaxpr: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region) -> Plan:
        """Returns the plan of a jaxpr for arguments of which so much is known."""
        key = (id(jaxpr), tuple(ins), tuple(outs), region)
        if key not in self._plans:
            self._plans[key] = self._forward(jaxpr, tuple(ins), outs, region)
        return self._plans[key]

    def _forward(self, jaxpr: Any, ins: tuple[Value, ...], outs: Sequence[Demand], region: Region) -> Plan:
        opened, demands = compat.open_jaxpr(jaxpr), self.demands(jaxpr, outs, region).of
        steps: list[EqnPlan] = []

        def step(eqn: Any, values: list[Value]) -> Sequence[Value]:
            inside, wanted = self.region_of(eqn, region), [demands.get(var) for var in eqn.outvars]
            planned = self.rule(eqn, inside).plan(Case(self, eqn, values, wanted, inside))
            planned.region = inside
            self.met.add(eqn.primitive.name)
            if planned.note:
                self.notes.setdefault(planned.note, source_lines.source_line(eqn))
            steps.append(planned)
            return planned.outs

        results = tuple(evaluate(jaxpr, ins, step, constant=of_constant, literal=of_literal))
        is_unchanged = all(dtype in (None, FLOAT32) for dtype in planned_dtypes(ins, opened.invars))
        is_unchanged = is_unchanged and all(step.is_unchanged for step in steps)
        plan = Plan(jaxpr, ins, steps, results, steps, is_unchanged)
        if not is_unchanged:
            plan.program = self.join(plan)
        return plan


#: What gives the program of a plan.
Join: TypeAlias = Callable[[Plan], Sequence[EqnPlan]]


def planned_dtypes(values: Sequence[Value], atoms: Sequence[Any]) -> tuple[Any, ...]:
    """Returns for each value the dtype it is held in; None for those that autocast leaves alone."""
    return tuple(v.dtype if ir.is_float32(atom) else None for v, atom in zip(values, atoms, strict=True))


def traced(atom: Any, source: Any = "computed") -> Value:
    """Returns a value in the dtype it was traced in."""
    return Value(ir.dtype_of(atom), source)


def of_literal(atom: Any) -> Value:
    """Returns a number that stands in the program."""
    dtype = ir.dtype_of(atom)
    is_real = dtype is not None and dtype.kind in "biuf"
    return Value(dtype, "constant", float(atom.val)) if is_real else traced(atom)


def of_constant(var: Any, value: Any) -> Value:
    """Returns an array that was closed over: a leaf; a constant, if it is one number that is known."""
    if ir.is_float32(var) and var.aval.size == 1 and not ir.is_traced(value):
        return Value(FLOAT32, "constant", float(np.asarray(value).reshape(())))
    return traced(var, "leaf")


def _constant(var: Any, value: Any) -> CastCache:
    return CastCache(value, ir.dtype_of(var))


def _literal(atom: Any) -> CastCache:
    # An array: what it is handed to as an argument may ask for its shape, which a Python number has not.
    value = np.asarray(atom.val, ir.dtype_of(atom))
    return CastCache(value, value.dtype, value.astype)
