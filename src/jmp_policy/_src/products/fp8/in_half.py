"""A traced program with its float8 products computed from half operands, as without its recipe."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core

from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.flatten import flattened
from jmp_policy._src.products.fp8.primitive import FLOAT8_DOT_GENERAL


def products_in_half(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that multiplies in half what another one multiplies in float8.

    Args:
      fn: a function of pytrees of arrays that `jax.jit` could trace. Arguments that are no arrays are static.

    Returns:
      A function of the same arguments. Scales are computed by nobody: XLA leaves out what nothing uses.
    """

    def in_half(*args: Any, **kwargs: Any) -> Any:
        jaxpr, arrays, rebuild = flattened(fn, args, kwargs)
        opened = compat.open_jaxpr(_in_half(jaxpr, {}))
        return rebuild(jax.core.eval_jaxpr(opened, compat.constants(jaxpr), *arrays))

    return in_half


def _in_half(jaxpr: Any, known: dict[int, Any]) -> Any:
    """Returns a jaxpr of the same kind, closed or open, without float8 products; equal ones as one object."""
    if id(jaxpr) not in known:
        opened = compat.open_jaxpr(jaxpr)
        new = opened.replace(eqns=[_equation(eqn, known) for eqn in opened.eqns])
        # The jaxpr is kept, so that no other one gets its identity.
        known[id(jaxpr)] = jaxpr, new if opened is jaxpr else jaxpr.replace(jaxpr=new)
    return known[id(jaxpr)][1]


def _equation(eqn: Any, known: dict[int, Any]) -> Any:
    if eqn.primitive is FLOAT8_DOT_GENERAL:
        return compat.changed_equation(eqn, eqn.primitive, formats=(None, None))
    if not ir.holds_jaxpr(eqn):
        return eqn
    params = {name: _param(value, known) for name, value in eqn.params.items()}
    return compat.changed_equation(eqn, eqn.primitive, **params)


def _param(value: Any, known: dict[int, Any]) -> Any:
    if hasattr(compat.open_jaxpr(value), "eqns"):
        return _in_half(value, known)
    return tuple(_param(part, known) for part in value) if type(value) is tuple else value
