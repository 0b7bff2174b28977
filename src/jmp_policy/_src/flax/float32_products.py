"""Warns of products that run in float32 because a parameter of a half-precision module is used uncast.

A module reads its own parameters in compute dtype. What it gets in other ways is float32 (an array that is no
parameter, `self.variables`, the table of another module), and one float32 operand makes a product float32.

    class Net(nnx.Module):                          # under "mixed_float16"
        def __call__(self, x):                      # x is float16
            return x @ self.embed.embedding[...].T  # float32: not a parameter of Net's own

How it was read does not matter, only what the program does with it. So when the outermost governed call ends,
the operations that it has put into the program being traced are looked at (outside of `jax.jit` and its like
there is none). Where no product of 8 terms has a float32 operand, that is all; else `uncast_operands` follows
what is stored.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jmp_policy._src.core.dtypes import is_wide
from jmp_policy._src.jaxpr import calls, compat
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.products.small_products import gains_nothing

_PRODUCTS = HAVING[Trait.PRODUCT]

#: Identity of a model that was warned of -> reference to it. No attribute, which would change its graph.
_WARNED: dict[int, Any] = {}


@contextlib.contextmanager
def watched(
    model: Any, stored: Callable[[], Iterable[tuple[str | None, Any]]], repair: str
) -> Iterator[None]:
    """Warns of what a call adds to the program that is being traced, once for each model.

    Args:
      model: the outermost module that is called under a policy.
      stored: gives the arrays that are stored for its half-precision modules, with their paths; for others
        with None.
      repair: how such an array is read in half, for the message.
    """
    program = None if id(model) in _WARNED else compat.program_being_traced()
    start = 0 if program is None else len(program.tracing_eqns)
    yield
    if program is None or not _has_wide_product(rows := compat.recorded(program, start)):
        return
    from jmp_policy._src.flax import uncast_operands  # Few models have such products.

    if found := uncast_operands.products(program, rows, stored()):
        key = id(model)
        _WARNED[key] = weakref.ref(model, lambda _: _WARNED.pop(key, None))
        uncast_operands.warn(found, repair)


def _has_wide_product(rows: Iterable[tuple[Any, Any]]) -> bool:
    for eqn, atoms in rows:
        name = eqn.primitive.name
        if name in _PRODUCTS:
            lhs, rhs, *_ = atoms
            if (is_wide(lhs.aval.dtype) or is_wide(rhs.aval.dtype)) and not gains_nothing(eqn):
                return True
        elif name in calls.KINDS and any(map(_has_wide_inside, calls.inner_jaxprs(eqn))):
            return True
    return False


def _has_wide_inside(jaxpr: Any) -> bool:
    return _has_wide_product((eqn, eqn.invars) for eqn in compat.open_jaxpr(jaxpr).eqns)
