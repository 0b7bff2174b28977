"""Reports where the memory of a training step goes, in float32 and under a policy, beside an estimate.

XLA says the sizes of arguments, results and temporary memory of the compiled program, and not what lies in
the last. The estimate from the jaxpr divides it, as the guides to mixed precision do: a half copy of each
parameter on top, two bytes less for each activation.
"""

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp_policy._src.core.dtypes import is_half, promote_dtype
from jmp_policy._src.core.report_base import Report, Table, bytes_text, percent
from jmp_policy._src.core.targets import Target, find_target
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.float32_replay import replay_in_float32
from jmp_policy._src.jaxpr.ir import is_array
from jmp_policy._src.products.fp8.eligibility import formats_of
from jmp_policy._src.report import progress
from jmp_policy._src.report.function import Function, as_function, donated_arguments
from jmp_policy._src.report.lowering.compile_process import Compiled
from jmp_policy._src.report.lowering.compiler import compile_here, compiled, exported, type_of
from jmp_policy._src.report.lowering.memory_estimate import analytic_memory_model


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind of memory.

    Args:
      category: "parameters", "half copies", "optimizer state", "gradients", "activations", "inputs",
        "results" or "temporaries".
      float32: what XLA allots to it in the program computed in float32; 0 for half copies, gradients and
        activations, which lie in temporaries and results.
      policy: what XLA allots to it in the program as it is.
      expected_float32, expected_policy: the estimate from the jaxpr alone, before XLA; it has no temporaries.
    """

    category: str
    float32: int
    policy: int
    expected_float32: int
    expected_policy: int


@dataclasses.dataclass(frozen=True)
class MemoryReport(Report):
    """What `memory_report` gives. Numbers are bytes on one device.

    Args:
      function: the name of the function.
      precision: the half types in the program; "float32" if there are none.
      backend: what it was compiled for: the default backend, or the target.
      rows: one per kind of memory.
      float32, policy: XLA's totals: arguments, results that overwrite none of them, and temporary memory.
      parameters: number of parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> report = memory_report(jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8)))
      >>> report.precision, len(report.rows) > 0
      ('float32', True)
    """

    function: str
    precision: str
    backend: str
    rows: tuple[MemoryRow, ...]
    float32: int
    policy: int
    parameters: int

    _rows = "rows"

    def row(self, category: str) -> MemoryRow:
        """The row of one kind of memory.

        Raises:
          KeyError: for a word that is none of them.
        """
        rows = {row.category: row for row in self.rows}
        if category not in rows:
            raise KeyError(f"No memory is called {category!r}: {', '.join(rows)}.")
        return rows[category]

    @property
    def accounted(self) -> tuple[float, float]:
        """The estimated total over XLA's, in float32 and under the policy."""
        float32, policy = self._expected
        return float32 / max(self.float32, 1), policy / max(self.policy, 1)

    @property
    def _expected(self) -> tuple[int, int]:
        rows = self.rows
        return sum(row.expected_float32 for row in rows), sum(row.expected_policy for row in rows)

    @property
    def verdict(self) -> str:
        """What half precision does to the memory, in one sentence."""
        if self.precision == "float32":
            return f"{self.function} computes nothing in half precision: it takes {bytes_text(self.policy)}."
        activations, copies = self.row("activations"), self.row("half copies").expected_policy
        changes = []
        if before := activations.expected_float32:
            changes.append(f"activations {_change(activations.expected_policy, before)}")
        if self.parameters and copies:
            changes.append(f"half copies +{copies / self.parameters:.2g} bytes per parameter")
        found = f"{self.precision} takes {percent(self.policy / max(self.float32, 1))} of float32's memory"
        if self.backend == "cpu" and self.policy > self.float32:
            found += "; for a CPU computes half products in float32. Name a target: 'H100', 'v5e'"
        return f"{found}. Estimated: {', '.join(changes)}." if changes else f"{found}."

    def _tables(self) -> Sequence[Table]:
        names = ("memory", "float32 ", f"{self.precision} ", "change ", "estimate, float32 ", "estimate ")
        rows = [_shown(row) for row in self.rows if any(dataclasses.astuple(row)[1:])]
        rows.append(_shown(MemoryRow("total", self.float32, self.policy, *self._expected)))
        return [Table(names, rows, f"Memory of {self.function} on {self.backend}")]

    def _lines(self) -> Sequence[str]:
        float32, half = (percent(share) for share in self.accounted)
        lines = [
            f"The estimate from the jaxpr is {float32} of what XLA allots in float32, {half} of it as it is.",
            "The compiler does not say what lies in its temporary memory: only its size is known.",
        ]
        if self.backend == "cpu" and self.precision != "float32":
            lines.append(
                "Processors have no half products: XLA keeps float32 copies of their operands, which a GPU "
                "or TPU doesn't. Name the device that will train, if it is not here: target='H100', 'v5e'."
            )
        return [*lines, self.verdict]


_CATEGORIES = (
    "parameters", "half copies", "optimizer state", "gradients", "activations", "inputs", "results",
    "temporaries",
)  # fmt: skip


def _change(now: int, before: int) -> str:
    """Formats a change in percent; more than tenfold is no change but another kind of memory."""
    if not before:
        return ""
    return f"{100 * (now / before - 1):+.0f} %" if now <= 10 * before else "> 10 times"


def _shown(row: MemoryRow) -> list[str]:
    found = [bytes_text(row.float32), bytes_text(row.policy), _change(row.policy, row.float32)]
    return [row.category, *found, bytes_text(row.expected_float32), bytes_text(row.expected_policy)]


def memory_report(
    fn: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any
) -> MemoryReport:
    """Reports what takes how much memory in a training step, as it is and computed in float32.

    Both programs are compiled for the default backend, and nothing runs. XLA says the sizes of arguments,
    results and temporary memory; beside them stands an estimate from the jaxpr, of half copies, gradients and
    activations too. A CPU keeps float32 copies of half operands: on a machine without a GPU or TPU name a
    `target`, whose compiler needs no device.
    Arguments and results that share memory (`donate_argnums` of a jitted `fn`) are counted once.

    Optimizer state is what an argument, field or key called `opt_state` or a state of optax holds. Parameters
    are the `Param`s of NNX modules; else the floating arrays below the name `params`; else those of the first
    argument whose types are all among the results, or of the first that has any.

    Args:
      fn: a training step, a loss, or any function that `jax.jit` could trace, also one of NNX modules.
      args, kwargs: its arguments; `jax.ShapeDtypeStruct`s will do. What is no array is static. With
        `NamedSharding`s on a mesh, numbers are those of one of its devices.
      target: a GPU or TPU to compile for, as `lowering_report` takes it: "H100", "v5e", "v5e:2x4"; None for
        the default backend.

    Returns:
      A `MemoryReport`; `print` shows it, `.verdict` is its last line.

    Raises:
      TypeError: when `fn` is no function.
      LoweringUnavailableError: when the compiler for the target is not installed.
      ValueError: for an unknown target, or a slice of TPUs of another size than the mesh.
      RuntimeError: when a program does not compile for the target; it may not fit, and the error says so.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def loss(params, x):
      ...     return jnp.tanh(x.astype(jnp.float16) @ params.astype(jnp.float16)).mean()
      >>> found = memory_report(jax.value_and_grad(loss), jnp.ones((64, 32)), jnp.ones((512, 64)))
      >>> found.row("parameters").policy, found.row("half copies").expected_policy
      (8192, 4096)
    """
    function = as_function(fn, args, kwargs, "memory_report")
    roles = argument_roles(function, kwargs)
    types = list(map(type_of, function.arrays))
    card = None if target is None else find_target(target)
    programs = [_Traced(function.call, types)]
    if halves := sorted(_half_types(programs[0].jaxpr)):
        types = [t.update(dtype=promote_dtype(t.dtype)) if is_half(t.dtype) else t for t in types]
        programs.append(_Traced(replay_in_float32(function.call), types))
    stats = _compiled(programs, card, function.name)
    found = [_by_category(program, made, roles) for program, made in zip(programs, stats, strict=True)]
    # By kind: found, then expected; in float32, then under the policy.
    columns = [program[kind] for kind in (0, 1) for program in (found[-1], found[0])]
    rows = [MemoryRow(name, *(column[name] for column in columns)) for name in _CATEGORIES]
    totals = [s.argument_bytes + s.output_bytes + s.temp_bytes - s.alias_bytes for s in stats]
    return MemoryReport(
        function=function.name,
        precision=", ".join(halves) or "float32",
        backend=jax.default_backend() if card is None else card.name,
        rows=tuple(rows),
        float32=totals[-1],
        policy=totals[0],
        parameters=sum(math.prod(t.shape) for t, r in zip(types, roles, strict=True) if r == "parameters"),
    )


def _half_types(jaxpr: Any) -> set[str]:
    """The names of the half and float8 types in a jaxpr and in those inside it."""
    atoms = [atom for eqn in ir.equations(jaxpr) for atom in (*eqn.invars, *eqn.outvars)]
    atoms += compat.open_jaxpr(jaxpr).invars
    eights = {name for eqn in ir.equations(jaxpr) for name in formats_of(eqn) or ()}
    return eights | {str(ir.dtype_of(atom)) for atom in atoms if is_half(ir.dtype_of(atom))}


class _Traced:
    """A program: a function of a list of arrays, their types, and which of them it may overwrite."""

    def __init__(self, call: Callable[[Sequence[Any]], Any], types: Sequence[Any]):
        self.call, self.types, self.jaxpr = call, types, jax.make_jaxpr(call)(types)
        self.donated = donated_arguments(self.jaxpr)


def _by_category(
    program: _Traced, stats: Compiled, roles: Sequence[str]
) -> tuple[Counter[str], Counter[str]]:
    """The memory of a program, as compiled and as expected."""
    types = program.types
    of_device = [t.shape if t.sharding is None else t.sharding.shard_shape(t.shape) for t in types]
    parts = [math.prod(t.shape) // max(math.prod(s), 1) or 1 for t, s in zip(types, of_device, strict=True)]
    found = Counter[str]()
    for array, shape, role in zip(types, of_device, roles, strict=True):
        found[role] += math.prod(shape) * array.dtype.itemsize
    # Constants that a function closes over may be arguments too.
    found["inputs"] += stats.argument_bytes - found.total()
    found.update({"results": stats.output_bytes - stats.alias_bytes, "temporaries": stats.temp_bytes})
    return found, analytic_memory_model(program.jaxpr, roles, program.donated, parts)


def _compiled(programs: Sequence[_Traced], card: Target | None, name: str) -> list[Compiled]:
    """The sizes of programs for the default backend or a target."""
    if card is None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return [
                compile_here(p.call, p.types, donate_argnums=p.donated, keep_unused=True)[1] for p in programs
            ]
    with progress.showing("memory_report"):
        progress.step(f"compiling {len(programs)} programs")
        answers = compiled([exported(p.call, p.types, p.donated, card.platform) for p in programs], card)
    if len(answers) < len(programs):
        raise KeyboardInterrupt  # It compares both.
    found = []
    for made, which in zip(answers, ("", " in float32"), strict=False):
        if made.error:
            raise RuntimeError(f"{name}{which} does not compile for {card.name}:\n{made.error}")
        # Temporary memory is what the peak leaves: a TPU's compiler says none.
        kept = made.argument_bytes + made.output_bytes - made.alias_bytes
        found.append(made._replace(temp_bytes=max(made.temp_bytes, made.peak_bytes - kept)))
    return found


def argument_roles(function: Function, kwargs: dict[str, Any]) -> list[str]:
    """The category of each array among the arguments: parameters, optimizer state or inputs."""
    arguments, roles = function.arguments, ["inputs"] * len(function.arguments)
    states = [False] * len(arguments)
    if not function.has_state:
        nodes = jax.tree.leaves((function.args, kwargs), is_leaf=_is_state)
        states = [_is_state(node) for node in nodes for leaf in jax.tree.leaves(node) if is_array(leaf)]
    names = [argument.path.split("/") for argument in arguments]
    fits = []
    for i, argument in enumerate(arguments):
        if states[i] or "opt_state" in names[i]:
            roles[i] = "optimizer state"
        elif argument.trainable:
            fits.append(i)
    trained = [i for i in fits if (arguments[i].in_module if function.has_state else "params" in names[i])]
    if not trained and not function.has_state:
        trained = _first_trained(function, fits)
    for i in trained:
        roles[i] = "parameters"
    return roles


def _is_state(node: Any) -> bool:
    """Whether a node of the arguments is a state of an optax transformation, ours included."""
    return hasattr(node, "_fields") and type(node).__module__.partition(".")[0] in ("optax", "jmp_policy")


def _first_trained(function: Function, fits: Sequence[int]) -> list[int]:
    """Which arrays are those of the first argument that comes out again; else of the first."""
    results = jax.tree.leaves(jax.eval_shape(function.call, function.arrays))
    made = Counter((tuple(t.shape), t.dtype) for t in results)
    groups: dict[int | str, list[int]] = {}
    for i in fits:
        groups.setdefault(function.arguments[i].position, []).append(i)
    for places in groups.values():
        if Counter((tuple(t.shape), t.dtype) for t in map(function.arrays.__getitem__, places)) <= made:
            return places
    return next(iter(groups.values()), [])
