"""What differs between versions of JAX in a jaxpr, and the few spots where its parts are taken apart.

Imports public modules of JAX only; takes from jaxprs and equations what `jax.core.eval_jaxpr` takes of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util

from jmp_policy._src.products.primitives import primitive_for

Literal = core.Literal
current_name_stack = source_info_util.current_name_stack

#: For functions that leave no call behind in a trace. 0.12 tells them from those inlined when lowered.
INLINED: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # type: ignore[attr-defined]


def open_jaxpr(jaxpr: Any) -> Any:
    """The equations of a jaxpr, closed or not. From 0.12 on a closed jaxpr is a jaxpr with its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """The values of a jaxpr's constant variables; none for an open one."""
    return getattr(jaxpr, "consts", ())


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Numbers of constants and of carries of a scan. 0.12 keeps them as the lengths of three trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def subfunctions(eqn: Any) -> Sequence[Callable[..., Sequence[Any]]]:
    """The functions of a custom_jvp (function, rule) or custom_vjp (function, forward, backward) equation.

    They take and return flat lists.
    """
    return [f.call_wrapped for f in eqn.primitive.get_bind_params(eqn.params)["subfuns"]]


def bind_primitive(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """What a primitive gives for values, with the parameters of an equation; always a list."""
    primitive = primitive_for(primitive, values, params)
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def stack_within(eqn: Any, first: int, last: int | None) -> Any:
    """The current name stack, continued by some of the scopes of an equation."""
    own = eqn.source_info.name_stack
    return current_name_stack() + type(own)(own.stack[first:last])


class eqn_context:  # noqa: N801 - used like a function
    """Runs a with-block on behalf of an equation: its name stack, source line and configuration.

    Args:
      eqn: the equation.
      stack: the whole name stack; left out, the equation's continues the one that is current.
    """

    __slots__ = ("_context", "_manager")

    def __init__(self, eqn: Any, stack: Any = None):
        info = eqn.source_info
        stack = current_name_stack() + info.name_stack if stack is None else stack
        self._context = source_info_util.user_context(info.traceback, name_stack=stack)
        self._manager = eqn.ctx.manager

    def __enter__(self) -> None:
        self._context.__enter__()
        self._manager.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._manager.__exit__(*exc)
        self._context.__exit__(*exc)


def convert_constvars_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr whose constants have become its first arguments."""
    jaxpr = open_jaxpr(jaxpr)
    if not jaxpr.constvars:
        return jaxpr
    without = {"consts": []} if hasattr(jaxpr, "consts") else {}
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], **without)


def manual_axes(params: dict[str, Any]) -> Any:
    """The mesh axes that a shard_map equation maps over."""
    return params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]


def residual_places(eqn: Any) -> Sequence[int | None]:
    """For each residual of a custom_vjp equation: which argument it is, None if the forward pass makes it."""
    return eqn.params["out_trees"]()[2]


def cotangents(outs: Any) -> Sequence[Any]:
    """What a backward pass of a custom_vjp equation gives; from 0.12 on together with a log."""
    return outs[0] if isinstance(outs, tuple) and len(outs) == 2 and isinstance(outs[0], list) else outs


def name_of(eqn: Any) -> str:
    """The name of the function that an equation calls."""
    return getattr(getattr(open_jaxpr(eqn.params["call_jaxpr"]), "debug_info", None), "func_name", "function")
