"""Functions with derivatives of their own (`jax.custom_jvp`, `jax.custom_vjp`), computed in float32.

The float32 replay of a program may forget such derivatives, as the programs that it replays were
differentiated before. Here the replay is differentiated, so they must stay.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.float32_replay import evaluate_in_float32


def custom_jvp(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Runs a custom_jvp, whose rule for tangents is the user's."""
    function = jax.custom_jvp(lambda *arrays: evaluate_in_float32(eqn.params["call_jaxpr"], arrays))
    _, user_rule = compat.subfunctions(eqn)
    count = len(eqn.outvars)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        outs = _in_float32(user_rule, [*primals, *tangents], [*eqn.invars, *eqn.invars])
        return outs[:count], outs[count:]

    function.defjvp(rule)
    return list(function(*arrays))


def custom_vjp(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Runs a custom_vjp, whose forward and backward pass are the user's."""
    function = jax.custom_vjp(lambda *arrays: evaluate_in_float32(eqn.params["call_jaxpr"], arrays))
    _, user_forward, user_backward = compat.subfunctions(eqn)
    count, types = len(eqn.outvars), []

    def forward(*arrays: Any) -> Any:
        def flat(*arrays: Any) -> Sequence[Any]:
            # With each argument: whether it is differentiated.
            return user_forward(*(part for array in arrays for part in (array, True)))

        atoms: list[Any] = []
        outs = _in_float32(flat, arrays, eqn.invars, atoms)
        places = compat.residual_places(eqn)  # Known once the forward pass was traced.
        types[:] = _chosen(atoms, eqn.invars, places)
        return outs[-count:], _chosen(outs, arrays, places)

    def backward(residuals: Any, cotangents: Any) -> Any:
        def flat(*arrays: Any) -> Sequence[Any]:
            return compat.cotangents(user_backward(*arrays))

        outs = _in_float32(flat, [*residuals, *cotangents], [*types, *eqn.outvars])
        return tuple(out if ir.is_array(out) else None for out in outs)

    function.defvjp(forward, backward)
    return list(function(*arrays))


def _chosen(made: Sequence[Any], arguments: Sequence[Any], places: Sequence[int | None]) -> list[Any]:
    """Returns the residuals: the next one that was made, or the argument in that place."""
    new = iter(made)
    return [next(new) if place is None else arguments[place] for place in places]


def _in_float32(
    function: Callable[..., Sequence[Any]],
    arrays: Sequence[Any],
    atoms: Sequence[Any],
    results: list[Any] | None = None,
) -> list[Any]:
    """Runs a function that was written for half arrays in float32.

    Args:
      function: of flat arrays; its results may hold things that are no arrays.
      arrays: its arguments. What is no array among them, the tangent of an integer, stays as it is.
      atoms: an atom of the jaxpr for each, of the dtype that the function was written for.
      results: is filled with the atoms of its results.
    """
    others: dict[int, Any] = {}
    places = [place for place, array in enumerate(arrays) if ir.is_array(array)]

    def traced(*given: Any) -> list[Any]:
        filled = list(arrays)
        for place, array in zip(places, given, strict=True):
            filled[place] = array
        outs = list(function(*filled))
        others.update((place, out) for place, out in enumerate(outs) if not ir.is_array(out))
        return [out for place, out in enumerate(outs) if place not in others]

    given = [arrays[place] for place in places]
    dtypes = [dtype if is_half(dtype := ir.dtype_of(atoms[place])) else None for place in places]
    jaxpr = ir.trace_as(traced, given, dtypes)
    made, opened = iter(evaluate_in_float32(jaxpr, given)), iter(compat.open_jaxpr(jaxpr).outvars)
    count = len(compat.open_jaxpr(jaxpr).outvars) + len(others)
    if results is not None:
        results[:] = [None if place in others else next(opened) for place in range(count)]
    return [others[place] if place in others else next(made) for place in range(count)]
