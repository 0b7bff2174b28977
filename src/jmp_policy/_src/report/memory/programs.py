"""Compiles the programs of a memory report: for the default backend, or for a target that is not there."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jmp_policy._src.core.targets import Target
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.report.lowering.compile_process import Compiled, described
from jmp_policy._src.report.lowering.compiler import compiled
from jmp_policy._src.report.lowering.export import exported
from jmp_policy._src.report.memory import buffers


class Traced(NamedTuple):
    """A program: a function of arrays, their types, and which of them it may overwrite."""

    call: Callable[..., Any]
    types: Sequence[Any]
    jaxpr: Any
    donated: tuple[int, ...]


def traced(call: Callable[..., Any], types: Sequence[Any]) -> Traced:
    """Traces a function, and finds out which of its arguments it may overwrite."""
    jaxpr = jax.make_jaxpr(call)(*types)
    return Traced(call, types, jaxpr, _donated(jaxpr))


def compiled_here(programs: Sequence[Traced]) -> list[tuple[Compiled, list[buffers.Allocation]]]:
    """Compiles programs for the default backend; returns their sizes, and what lies where if it says so."""
    found = []
    for program in programs:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            jitted = jax.jit(program.call, donate_argnums=program.donated, keep_unused=True)
            executable = jitted.lower(*program.types).compile()
        found.append((described(executable), buffers.allocations(executable)))
    return found


def compiled_elsewhere(
    programs: Sequence[Traced], card: Target, name: str
) -> list[tuple[Compiled, list[buffers.Allocation]]]:
    """Compiles programs for a target; returns their sizes, temporary memory being what the peak leaves."""
    written = [
        exported(lambda arrays, call=p.call: call(*arrays), p.types, p.donated, card.platform)
        for p in programs
    ]
    found = compiled(written, card)
    for made, which in zip(found, ("", " in float32"), strict=False):
        if made.error:
            raise RuntimeError(f"{name}{which} does not compile for {card.name}:\n{made.error}")
    kept = [made.argument_bytes + made.output_bytes - made.alias_bytes for made in found]
    return [
        (made._replace(temp_bytes=max(made.temp_bytes, made.peak_bytes - rest)), [])
        for made, rest in zip(found, kept, strict=True)
    ]


def _donated(jaxpr: Any) -> tuple[int, ...]:
    """Returns which arguments a jitted function in a program may overwrite."""
    opened = compat.open_jaxpr(jaxpr)
    given = set()
    for eqn in opened.eqns:
        flags = eqn.params.get("donated_invars", ())
        given |= {var for var, flag in zip(eqn.invars, flags, strict=False) if flag}
    return tuple(i for i, var in enumerate(opened.invars) if var in given)
