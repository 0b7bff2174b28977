"""Compiles the program of a report once, however often the report is asked for.

A compiled function cannot be kept by the function that it was made of: a loss function may read values that
have changed since. So each call traces and lowers anew, with every array an argument, those that the function
closes over too. What is compared is the text of the lowered program.
"""

import collections
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from jmp_policy._src.jaxpr import compat, ir

#: Programs kept; the one that was not used for longest goes first.
_MOST = 16
_kept: "collections.OrderedDict[Any, Any]" = collections.OrderedDict()
_lock = threading.Lock()


def run_compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """Runs a function in one compiled program, which is kept for the next call with an equal one.

    Args:
      fn: a function of pytrees of arrays.
      args: its arguments.

    Returns:
      What the function returns.
    """
    # A function of its own: JAX would look up the trace of an earlier call.
    closed, shapes = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*args)
    jaxpr, constants = compat.open_jaxpr(closed), compat.constants(closed)

    def evaluate(constants: Any, leaves: Any) -> Any:
        return jax.core.eval_jaxpr(jaxpr, constants, *leaves)

    given = constants, jax.tree.leaves(args)
    lowered = jax.jit(evaluate).lower(*given)
    compiled = lowered.compile() if _has_constants(jaxpr) else _once(lowered, given)
    return jax.tree.unflatten(jax.tree.structure(shapes), compiled(*given))


def _has_constants(jaxpr: Any) -> bool:
    """Returns whether a call or loop inside has arrays of its own, which need not be in the text."""
    return any(
        len(compat.constants(inner)) > 0 or _has_constants(compat.open_jaxpr(inner))
        for eqn in jaxpr.eqns
        for inner in ir.subjaxprs(eqn)
    )


def _once(lowered: Any, given: Any) -> Any:
    """Returns the compiled program with the text of a lowered one, for arrays that lie where these do."""
    places = tuple(getattr(x, "sharding", None) for x in jax.tree.leaves(given))
    key = lowered.as_text(), places
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    compiled = lowered.compile()
    with _lock:
        _kept[key] = compiled
        while len(_kept) > _MOST:
            _kept.popitem(last=False)
    return compiled
