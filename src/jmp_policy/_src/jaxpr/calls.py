"""Which operations run a jaxpr: the one table of calls, loops and branches.

Whoever runs or walks a program asks here what an operation is, and has a rule for each `Kind`. What is inside
a loop or branch is in `control_flow`.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.jaxpr import compat, ir, jax_sources
from jmp_policy._src.jaxpr.op_table import HAVING, Trait


class Kind(enum.Enum):
    """How an operation runs the jaxprs among its parameters."""

    JIT = "jax.jit"
    CALL = "a plain call, inlined"
    CHECKPOINT = "jax.checkpoint"
    CUSTOM_JVP = "jax.custom_jvp: with a rule for its tangents"
    CUSTOM_VJP = "jax.custom_vjp: with a forward and a backward pass"
    SHARD_MAP = "jax.shard_map: once per device, on parts of its arrays"
    PLATFORM = "lax.platform_dependent: what the branch without platforms computes, on every platform"
    SCAN = "lax.scan"
    WHILE = "lax.while_loop"
    COND = "lax.cond, lax.switch"


#: Primitive's name -> its kind. A `cond` may be of kind PLATFORM: ask `kind_of`.
KINDS: Mapping[str, Kind] = {
    "jit": Kind.JIT,
    "closed_call": Kind.CALL,
    "checkpoint": Kind.CHECKPOINT,
    "remat2": Kind.CHECKPOINT,
    "custom_jvp_call": Kind.CUSTOM_JVP,
    "custom_vjp_call": Kind.CUSTOM_VJP,
    "shard_map": Kind.SHARD_MAP,
    "scan": Kind.SCAN,
    "while": Kind.WHILE,
    "cond": Kind.COND,
}

#: Operations whose jaxpr is a combiner or a kernel, not a program that runs once.
_NO_CALL = HAVING[Trait.COMBINER] | HAVING[Trait.KERNEL]


class Called(NamedTuple):
    """A jaxpr that an operation calls once.

    Args:
      jaxpr: closed or not.
      skipped: number of operands that come before its arguments.
    """

    jaxpr: Any
    skipped: int = 0


def kind_of(eqn: Any) -> Kind | None:
    """How an operation runs a jaxpr; None for one that runs none, or in a way nobody here knows."""
    kind = KINDS.get(eqn.primitive.name)
    return Kind.PLATFORM if kind is Kind.COND and ir.default_branch(eqn) is not None else kind


def called(eqn: Any) -> Called | None:
    """The jaxpr that an operation stands for once: operands are its arguments, results its results.

    Of a `lax.platform_dependent` that is the branch without platforms, the index of the branch is skipped:
    other branches compute the same in another way.
    """
    kind = kind_of(eqn)
    if kind is Kind.PLATFORM:
        return Called(ir.default_branch(eqn), 1)
    if kind in (None, Kind.SCAN, Kind.WHILE, Kind.COND):
        return None
    return Called(eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"])


def looked_into(eqn: Any) -> Called | None:
    """The jaxpr that an operation calls once, also where only its shape says so.

    An operation that is in no table is taken for a call if a jaxpr among its parameters takes as many
    arguments as it has operands, and gives as many results. A `lax.platform_dependent` is no such call: every
    branch is looked into.
    """
    if kind_of(eqn) is Kind.PLATFORM:
        return None
    if kind_of(eqn) is not None or eqn.primitive.name in _NO_CALL:
        return called(eqn)
    for jaxpr in map(compat.open_jaxpr, ir.subjaxprs(eqn)):
        if len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars):
            return Called(jaxpr)
    return None


def inner_jaxprs(eqn: Any) -> Sequence[Any]:
    """The jaxprs inside an operation of which at least one runs; none of kernels and reductions."""
    if eqn.primitive.name in _NO_CALL:
        return ()
    one = looked_into(eqn)
    return tuple(ir.subjaxprs(eqn)) if one is None else (one.jaxpr,)


def is_draw(eqn: Any) -> bool:
    """Whether an operation calls a function of jax.random that depends on nothing but a key and constants."""
    arrays = (atom for atom in eqn.invars if not isinstance(atom, compat.Literal))
    is_call = kind_of(eqn) is Kind.JIT and not any(is_floating(ir.dtype_of(atom)) for atom in arrays)
    return is_call and jax_sources.is_drawn(eqn)


def is_bound(eqn: Any) -> bool:
    """Whether a jit says how its arguments are laid out, or that they may be overwritten."""
    return any(eqn.params.get("donated_invars", ())) or ir.has_shardings(eqn.params)
