"""Every use of JAX's private parts, and what differs between its versions.

Private is what JAX documents nowhere: parameters of equations that hold more than numbers and jaxprs, where
an equation was traced, the context of a lowering rule. Each function says what it reads and which public way
was missing. All of it was read in JAX 0.10.2 and 0.12.0; what belongs to one of them says so. Other files of
the package take from jaxprs and their equations what the documentation of JAX's interpreters shows.

What could change without an error is checked when it is first used, on a small program whose answer is known.
"""

import contextlib
import contextvars
import functools
import itertools
import os
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.interpreters import mlir, partial_eval

Literal, current_name_stack = core.Literal, source_info_util.current_name_stack

#: Versions of JAX in which the private parts were read.
READ_IN = "0.10.2 and 0.12.0"

#: For functions that leave no call behind in a trace. 0.12 tells them from those inlined when lowered.
INLINED: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # type: ignore[attr-defined]


def require(found: bool, what: str, package: ModuleType = jax, read_in: str = READ_IN) -> None:
    """Raises RuntimeError where a private part of `package` (`jax` or `flax`) is not as it was read.

    The message names the part, what it is read for (`what`), the versions that have it, and what to do.
    """
    if not found:
        name = package.__name__
        raise RuntimeError(
            f"jmp_policy reads {what}. {name} {read_in} have it, and {name} {package.__version__}, which is "
            f"installed, has it no more or elsewhere. Install one of those versions of {name}, or a newer "
            "jmp_policy."
        )


@functools.cache
def checked(check: Callable[[], Any], what: str) -> Any:
    """What a check gives; it runs once, as what it tests can't change while the program runs.

    The check raises or gives None where the private part, named by `what` for the error, is not as read.
    """
    try:
        with jax.disable_jit(False):
            answer = check()
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration):
        answer = None
    require(answer is not None, what)
    return answer


def open_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr without its constants; from 0.12 on a closed jaxpr is a jaxpr that has them."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """The values of a jaxpr's constant variables; none for an open one."""
    return getattr(jaxpr, "consts", ())


def convert_constvars_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr whose constants have become its first arguments.

    Private: `Jaxpr.replace`. JAX has no public way to make a jaxpr from another one.
    """
    jaxpr = open_jaxpr(jaxpr)
    if not jaxpr.constvars:
        return jaxpr
    without = {"consts": []} if hasattr(jaxpr, "consts") else {}
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], **without)


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carries of a scan.

    Private: `num_consts`, `num_carry` (0.10.2), lengths of `ft_in` (0.12.0). No public way tells them apart.
    """
    checked(_probe_scan, "a scan's numbers of constants and carries from `num_consts` or `ft_in`")
    return _scan_sizes(params)


def _scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def platforms_of_branches(eqn: Any) -> Sequence[Any] | None:
    """The platforms of each branch of a `lax.platform_dependent`, None for the default; else None.

    Private: the parameter `branches_platforms`. JAX has no public way to tell such a `cond` from others.
    """
    return eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None


def _probe_scan() -> bool | None:
    """Reads the sizes of a scan with one constant and two carries."""

    def probe(const: Any, first: Any, second: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            return (lax.mul(carry[0], const), lax.mul(carry[1], x[0])), lax.mul(x[1], x[2])

        return lax.scan(body, (first, second), xs)

    one, row = np.float32(1), np.ones(2, np.float32)
    scan = _equation(jax.make_jaxpr(probe)(one, one, one, (row, row, row)), "scan")
    return _scan_sizes(scan.params) == (1, 2) or None


def _equation(jaxpr: Any, name: str) -> Any:
    return next(eqn for eqn in open_jaxpr(jaxpr).eqns if eqn.primitive.name.startswith(name))


def subfunctions(eqn: Any) -> Sequence[Callable[..., Sequence[Any]]]:
    """The functions of a custom_jvp (function, rule) or custom_vjp (function, forward, backward).

    They take and return flat lists. Private: `subfuns` among the parameters for binding. JAX has no public
    way to ask an equation for its derivative rules.
    """
    return [f.call_wrapped for f in eqn.primitive.get_bind_params(eqn.params)["subfuns"]]


def set_checkpoint_rule(primitive: Any, rule: Callable[..., Any]) -> None:
    """Says what `jax.checkpoint` does with a primitive that is not JAX's.

    Private: `partial_eval_jaxpr_custom_rules`. No public way adds a primitive to those of JAX.
    """
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def is_saved(saveable: Any) -> bool:
    """Whether a policy of `jax.checkpoint` saves a value, for what it answered.

    Private: the class of an object that some policies give for False. JAX has no public name for it.
    """
    recomputed = checked(_probe_checkpoint_policy, "whether a policy of jax.checkpoint saves a value")
    return saveable is not False and not isinstance(saveable, recomputed)


def _probe_checkpoint_policy() -> type | None:
    """Asks a policy that offloads one name about a value of another, which it wants computed again."""
    names: dict[str, Any] = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["x"]}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src="device", offload_dst="pinned_host"
    )
    recomputed = type(policy(core.primitives.add_p))
    return None if recomputed is bool else recomputed


def is_raised_by_cudnn(error: BaseException) -> bool:
    """Returns whether JAX's cuDNN attention refused its operands.

    Private: the name of the package that raises. JAX has no public exception for it.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").startswith("jax._src.cudnn")


def manual_axes(params: dict[str, Any]) -> Any:
    """The mesh axes that a shard_map equation maps over.

    Private: `manual_axes` (0.10.2), `newly_manual_axes` (0.12.0). JAX has no public way to ask an equation.
    """
    names = [name for name in ("newly_manual_axes", "manual_axes") if name in params]
    require(bool(names), "the axes of a shard_map from `newly_manual_axes` or `manual_axes`")
    return params[names[0]]


def name_of(eqn: Any) -> str:
    """The name of the function that an equation calls.

    Private: `Jaxpr.debug_info`. JAX has no public way to ask a call for its function's name.
    """
    info = open_jaxpr(eqn.params["call_jaxpr"]).debug_info
    require(hasattr(info, "func_name"), "a function's name from `debug_info.func_name` of its jaxpr")
    return info.func_name


def file_of(jaxpr: Any) -> str:
    """The file of the function that was traced to a jaxpr; "" if JAX does not tell.

    Private: `Jaxpr.debug_info`. JAX has no public way to ask a call for its function's file.
    """
    return getattr(getattr(jaxpr, "debug_info", None), "func_filename", None) or ""


def bind_primitive(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """What a primitive gives for values, with the parameters of an equation; always a list."""
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def _stack_entries() -> tuple[type, type]:
    """The classes of a name stack's scopes and transforms, found in a program that has both."""
    what = "the scopes and transforms around an operation from the entries of its name stack"
    return checked(_probe_name_stack, what)


def _probe_name_stack() -> tuple[type, type] | None:
    """Looks for a scope's name and for that of transposition in a gradient."""

    def probe(x: Any) -> Any:
        with jax.named_scope("jmp_policy_probe"):
            return lax.mul(x, x)

    equations = open_jaxpr(jax.make_jaxpr(jax.grad(probe))(np.float32(1))).eqns
    found = {part.name: type(part) for eqn in equations for part in eqn.source_info.name_stack.stack}
    scope, transform = found["jmp_policy_probe"], found["transpose"]
    return None if scope is transform else (scope, transform)


def scopes(eqn: Any) -> list[str]:
    """The names of the scopes around an equation, outermost first; transforms are left out.

    What the rule of a custom_jvp computes has, after transposing, the scopes around it twice, the second time
    behind another `jvp`: they count once.

    Private: the entries of `source_info.name_stack`. JAX prints them with its transforms, and has no public
    way to tell the two apart: "transpose(jvp(a))" may be a user's name.
    """
    stack = eqn.source_info.name_stack.stack
    if not stack:
        return []
    scope, _ = _stack_entries()
    names: list[str] = []
    for is_scope, parts in itertools.groupby(stack, lambda part: isinstance(part, scope)):
        inner = [part.name for part in parts] if is_scope else []
        names += inner if inner != names else []
    return names


def is_transposed(eqn: Any) -> bool:
    """Whether an equation's own name stack says that transposing a derivative put it there.

    Private: as for `scopes`.
    """
    stack = eqn.source_info.name_stack.stack
    if not stack:
        return False
    _, transform = _stack_entries()
    return any(isinstance(part, transform) and part.name == "transpose" for part in stack)


def stack_of(eqn: Any) -> Any:
    """The name stack of an equation, which prints as profiles show it. Private: as for `scopes`."""
    _stack_entries()
    return eqn.source_info.name_stack


def stack_within(eqn: Any, first: int, last: int | None) -> Any:
    """The current name stack, continued by some of the scopes of an equation.

    Private: slices of a name stack. `jax.named_scope` adds scopes, but no transforms.
    """
    return current_name_stack() + eqn.source_info.name_stack[first:last]


def context_of(eqn: Any) -> Any:
    """The context an equation was traced in (mesh, compute type), to tell equations apart by.

    Private: `JaxprEqn.ctx`. Without it, two operations that differ in it alone would look the same.
    """
    return eqn.ctx


@contextlib.contextmanager
def eqn_context(eqn: Any, stack: Any = None) -> Iterator[None]:
    """Runs a with-block on behalf of an equation: its name stack, source line and configuration.

    A whole name `stack` may be given; else the equation's continues the one that is current. In a jitted
    function of JAX's own (`jax.nn.silu`) no line is the user's: that of the equation around it stays.
    Private: `source_info` and `ctx.manager`, as `jax.core.eval_jaxpr` enters them. JAX has no public way to
    run code as an equation's.
    """
    info, around = eqn.source_info, _AROUND.get()
    place = info.traceback if around is None or _is_users(info.traceback) else around
    stack = current_name_stack() + info.name_stack if stack is None else stack
    token = _AROUND.set(place)
    try:
        with source_info_util.user_context(place, name_stack=stack), eqn.ctx.manager:
            yield
    finally:
        _AROUND.reset(token)


#: Where the equation was traced on whose behalf code runs.
_AROUND: contextvars.ContextVar[Any] = contextvars.ContextVar("_AROUND", default=None)


@functools.lru_cache(1024)
def _is_users(place: Any) -> bool:
    """Whether frames of others than JAX are in a traceback."""
    directory = os.path.join(os.path.dirname(jax.__file__), "")
    return place is not None and any(not frame.file_name.startswith(directory) for frame in place.frames)


def frames(eqn: Any) -> Sequence[Any]:
    """The Python frames in which an equation was traced, innermost first; none if JAX kept none.

    Private: `source_info.traceback`. JAX has no public way to ask where an operation was written.
    """
    traceback = eqn.source_info.traceback
    return () if traceback is None else traceback.frames


def source_summary(eqn: Any) -> str:
    """Returns "file.py:12 (function)" of the frame that JAX takes for the user's; "unknown" without one.

    Private: as for `frames`.
    """
    return source_info_util.summarize(eqn.source_info)


def varying(aval: Any) -> frozenset[str]:
    """The mesh axes over which a value of this type differs from device to device, inside shard_map.

    `aval` is what `jax.typeof` gives for a value, or `jax.eval_shape` for a result.
    Private: `manual_axis_type.varying`. `jax.typeof` shows them in print, no public attribute has them.
    """
    if not isinstance(aval, jax.core.ShapedArray | jax.ShapeDtypeStruct):
        return frozenset()
    what = "the axes over which an array varies from `manual_axis_type.varying` of its type"
    require(hasattr(aval, "manual_axis_type"), what)
    manual: Any = aval.manual_axis_type
    return frozenset() if manual is None else frozenset(manual.varying)


def is_for_one_device(ctx: Any) -> bool:
    """Whether a lowering rule lowers a program for one device, outside of `shard_map` and `pmap`.

    Private: `module_context.axis_context`. JAX has no public way to ask how many devices a program is for.
    """
    has_class = hasattr(mlir, "ShardingContext")
    require(has_class, "a program's number of devices from `jax.interpreters.mlir.ShardingContext`")
    context = ctx.module_context.axis_context
    return isinstance(context, mlir.ShardingContext) and context.num_devices == 1


def einsum_with(dot_general: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `jnp.einsum` with another function in place of `lax.dot_general`, as Flax's layers take one.

    Private: the argument `_dot_general`. `jnp.einsum` has no public one for it.
    """
    return functools.partial(jax.numpy.einsum, _dot_general=dot_general)


def traced_by(x: Any) -> tuple[Any, Any, Sequence[Any]] | None:
    """The tracer that a value of a staged program is, its equation, and that one's operands.

    An input or a constant of the trace has None and (). Tracers of vmap and of derivatives stand for those
    inside. Returns None for a value that is not staged, for a number, and where JAX does not tell.
    Private: `parent` and `val` of a tracer, `in_tracers` of the first, `primal`. JAX has no public way.
    """
    while isinstance(x, jax.core.Tracer) and not hasattr(x, "parent"):
        x = getattr(x, "val", getattr(x, "primal", None))
    eqn = getattr(x, "parent", None)
    operands = () if eqn is None else getattr(eqn, "in_tracers", None)
    if not isinstance(x, jax.core.Tracer) or operands is None:
        return None
    return None if isinstance(getattr(x, "val", None), Literal) else (x, eqn, operands)


def trace_of(x: Any) -> Any | None:
    """The trace that a tracer is of; None for anything else. Private: `_trace` of a tracer."""
    return getattr(x, "_trace", None) if isinstance(x, jax.core.Tracer) else None


def number_of(x: Any) -> Any | None:
    """A number that is no input of a program being traced, as NumPy has it; None for any other value.

    Private: `val` of a tracer, a literal.
    """
    x = getattr(getattr(x, "val", None), "val", None) if isinstance(x, jax.core.Tracer) else x
    return None if x is None else np.asarray(x)


def program_being_traced() -> Any | None:
    """What JAX has recorded of the program that it traces just now; None where operations run at once.

    Derivatives and vmap record nothing themselves: it is the program that they are part of. To be read by
    `recorded` and `recorded_constants`. Private: the trace in `get_opaque_trace_state`, `parent_trace` and
    `frame` of traces. JAX has no public way to look at a program before its trace ends.
    """
    checked(_probe_recorded, "the operations of a program being traced from `frame.tracing_eqns`")
    return _program_being_traced()


def _program_being_traced() -> Any | None:
    trace = core.get_opaque_trace_state(convention="nnx")._trace_ref()
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return None if trace is None else trace.frame


def recorded(program: Any, start: int = 0) -> list[tuple[Any, list[Any]]]:
    """The equations that a program being traced has from an index on, each with the atoms it takes.

    Private: `tracing_eqns` of a trace's frame, `val` of tracers, as for `program_being_traced`.
    """
    eqns = (eqn() if isinstance(eqn, weakref.ref) else eqn for eqn in program.tracing_eqns[start:])
    # One that is gone gave what nobody uses.
    return [(eqn, [x.val for x in eqn.in_tracers]) for eqn in eqns if eqn is not None]


def recorded_constants(program: Any) -> dict[Any, Any]:
    """The values that a program being traced has closed over, by their variables.

    Private: `constvar_to_val` of a trace's frame, as for `program_being_traced`.
    """
    return program.constvar_to_val.copy()


def _probe_recorded() -> bool | None:
    """Looks at a product of an argument and a closed-over array, while a gradient of it is traced."""
    closed_over, found = np.ones(2, np.float32), []

    def probe(x: Any) -> Any:
        program = _program_being_traced()
        before = len(recorded(program))
        out = lax.mul(x, closed_over)
        (eqn, atoms), *_ = recorded(program, before)
        constants = recorded_constants(program)
        (argument, _, _) = traced_by(x) or (None, None, ())
        is_argument = argument is not None and argument.val is atoms[0]
        found.append((eqn.primitive.name, is_argument, atoms[1] in constants))
        return lax.reduce_sum(out, (0,))

    jax.make_jaxpr(jax.grad(probe))(closed_over)
    return found == [("mul", True, True)] or None
