"""Runs several equations in float32 as one function of half values, which are all that its derivative keeps.

JAX keeps for the backward pass what the derivative of each operation needs: of a GELU in float32, six float32
arrays for one of float16. As one function it keeps its operands, and derives again from them, in float32:

    y     = half(f(float32(x)))
    dy    = half(f'(float32(x)) * float32(dx))     # computed again from x, under jax.checkpoint

Nothing is rounded that was not rounded before, so gradients have the errors that they would have had.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.autocast.parts import Part, Uses, elementwise_parts, is_half, softmax_parts
from jmp_policy._src.autocast.planner import EqnPlan, Plan
from jmp_policy._src.autocast.softmax import kept_normalized_exp, normalized_exp
from jmp_policy._src.autocast.values import CastCache, Value
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.ir import evaluate
from jmp_policy._src.products import binding


def join(plan: Plan) -> Sequence[EqnPlan] | Mapping[Any, np.dtype]:
    """Returns the program of a plan, with its parts joined; or first, which values have to be half for that.

    Those are results of parts that are held in float32 and read in half: what moves them is to be planned so.

    Args:
      plan: of a whole jaxpr.
    """
    uses = Uses(plan)
    softmaxes = list(softmax_parts(uses))
    taken = {place for part in softmaxes for place in part.places}
    parts = [*softmaxes, *elementwise_parts(uses, taken)]
    narrowed = {var: part.half for part in parts for var in part.outvars if not is_half(uses.held(var))}
    if narrowed:
        return narrowed
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
