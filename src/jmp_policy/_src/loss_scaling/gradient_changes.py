"""Whether gradients are still a multiple of those of the backward pass, or clipped, normalised, divided.

Of a value its degree is followed: with a loss scale k times as large it is k**degree times as large. The
scale and gradients have 1, their squares 2, a direction 0; parameters, numbers, and gradients of a loss
without the scale 0. The sum of values of two degrees has none, and neither has what is computed from it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import calls, compat, ir
from jmp_policy._src.jaxpr.data_flow import ancestors, computed_from, ends_backward_pass
from jmp_policy._src.jaxpr.op_table import HAVING, PYTHON_OPERATORS, Trait

#: The degree of what has none, of what nothing is known of, of 0, inf and NaN, and of integers and masks.
NONE, UNKNOWN, ANY, DISCRETE = math.inf, math.nan, None, -math.inf

Degree = float | None


def degrees(grads: PyTree, params: PyTree, scale: PyTree) -> set[Degree]:
    """The degrees of gradients other than 1, as far as the running trace and a backward pass in it tell.

    Args:
      grads: gradients before an update.
      params: the parameters, or None.
      scale: the loss scale.
    """
    near = ancestors(grads, stop=ends_backward_pass)
    if not any(map(ends_backward_pass, near.equations)):
        return set()
    known: dict[int, Degree] = {_key(x): 0.0 for x in jax.tree.leaves(params)}
    known |= {_key(x): 1.0 for x in jax.tree.leaves(scale)}
    scaled, leaves = computed_from(grads, ancestors(scale)), jax.tree.leaves(grads)
    if from_scale := [x for x in leaves if _key(x) in scaled]:
        leaves = from_scale
        known |= {_key(x): 0.0 for x in near.nodes.values() if _is_unscaled(x, scaled)}
    found = {_of_traced(x, known) for x in leaves}
    return {d for d in found if d == NONE or (d is not None and math.isfinite(d) and d != 1)}


def _is_unscaled(x: Any, scaled: set[int]) -> bool:
    """Whether a value comes out of a backward pass that the loss scale did not go into; no zeros."""
    tracer, eqn, operands = compat.traced_by(x) or (x, None, ())
    if eqn is None or id(tracer) in scaled or not ends_backward_pass(eqn):
        return False
    return any(compat.traced_by(operand) for operand in operands)


def _of_traced(value: Any, known: dict[int, Degree]) -> Degree:
    """The degree of a value of the running trace; `known` has those of tracers by their `id`."""
    waiting = [value]
    while waiting:
        tracer, eqn, operands = compat.traced_by(waiting[-1]) or (waiting[-1], None, ())
        if id(tracer) in known:
            waiting.pop()
        elif eqn is None:
            known[id(tracer)] = _of_input(tracer)
        elif ends_backward_pass(eqn):
            known[id(tracer)] = 1.0
        elif missing := [x for x in operands if _key(x) not in known]:
            waiting.extend(missing)
        else:
            found = _of_results(eqn, [known[_key(x)] for x in operands], [tracer.dtype])
            known[id(tracer)] = found[0] if len(set(found)) == 1 else UNKNOWN
    return known[_key(value)]


def _key(x: Any) -> int:
    return id((compat.traced_by(x) or (x,))[0])


def _of_input(x: Any) -> Degree:
    dtype = jnp.result_type(x)
    number = compat.number_of(x) if jnp.issubdtype(dtype, jnp.number) else None
    if number is not None and bool(np.all((number == 0) | ~np.isfinite(number))):
        return ANY
    if not jnp.issubdtype(dtype, jnp.inexact):
        return DISCRETE
    return UNKNOWN if number is None else 0.0


def _of_jaxpr(jaxpr: Any, degrees: Sequence[Degree]) -> list[Degree]:
    jaxpr = compat.open_jaxpr(jaxpr)
    known: dict[Any, Degree] = dict(zip(jaxpr.invars, degrees, strict=True))
    known |= dict.fromkeys(jaxpr.constvars, UNKNOWN)

    def of(atom: Any) -> Degree:
        return _of_input(atom.val) if isinstance(atom, compat.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        dtypes = map(ir.dtype_of, eqn.outvars)
        known |= zip(eqn.outvars, _of_results(eqn, list(map(of, eqn.invars)), dtypes), strict=True)
    return list(map(of, jaxpr.outvars))


def _of_results(eqn: Any, degrees: Sequence[Degree], dtypes: Iterable[Any]) -> list[Degree]:
    """The degrees of an operation's results, which have these dtypes."""
    if (inner := calls.called(eqn)) is not None:
        return _of_jaxpr(inner.jaxpr, degrees[inner.skipped :])
    degree = _of_result(eqn, degrees)
    discrete = degree if degree is not None and (degree == NONE or math.isnan(degree)) else DISCRETE
    return [degree if jnp.issubdtype(dtype, jnp.inexact) else discrete for dtype in dtypes]


def _of_result(eqn: Any, degrees: Sequence[Degree]) -> Degree:
    name, both = eqn.primitive.name, _combined(degrees)
    if name == "unscale":
        return _of_product(_combined(degrees[1:]), degrees[0], divides=True)
    is_product = name in HAVING[Trait.PRODUCT] or PYTHON_OPERATORS.get(name) in ("*", "/")
    power = _POWERS.get(name) or (eqn.params.get("y", 2) if name in ("square", "integer_pow") else None)
    if both in (ANY, DISCRETE):
        return ANY if both is ANY and (is_product or power or name in _SAME) else 0.0
    if math.isnan(both) or both == 0:
        return both
    if is_product:
        return _of_product(*degrees[:2], divides=PYTHON_OPERATORS.get(name) == "/")
    if power is not None:
        return both * power if both != NONE else NONE
    if name in HAVING[Trait.DECIDES] - HAVING[Trait.COMPARISON]:
        return 0.0 if name == "sign" else NONE
    if name in _SAME or NONE in degrees:
        return both
    # Of several operands, as in a power, more would have to be known.
    return NONE if name in HAVING[Trait.NONLINEAR] and len(degrees) == 1 else UNKNOWN


def _of_product(first: Degree, second: Degree, divides: bool) -> Degree:
    if first is None or second is None:
        return ANY if first is None or not divides else UNKNOWN
    if NONE in (first, second):
        return NONE
    return first - second if divides else first + second


def _combined(degrees: Iterable[Degree]) -> Degree:
    """The degree of a sum."""
    degrees = list(degrees)
    found: set[float] = {degree for degree in degrees if degree is not None and degree != DISCRETE}
    if any(map(math.isnan, found)):
        return UNKNOWN
    if not found:
        return ANY if ANY in degrees else DISCRETE
    return NONE if len(found) > 1 else found.pop()


_POWERS = {"sqrt": 0.5, "rsqrt": -0.5}

#: Operations whose results have the degree that their operands have in common.
_SAME = frozenset[str]().union(
    *(HAVING[trait] for trait in (Trait.VIEW, Trait.MOVES, Trait.KEEPS_WEIGHT, Trait.ADDS, Trait.EXACT)),
    *(HAVING[trait] for trait in (Trait.REDUCES, Trait.COLLECTIVE, Trait.KEEPS_SIGN, Trait.COMPARISON)),
)
