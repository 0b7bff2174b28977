"""A program in which parameters are cast at their use, run so that their gradients are float32.

Values are those of the program as it was traced. Beside the half value of a weight, through reshapes, slices
and look-ups, into loops and calls, goes the same of the float32 parameter. Nobody reads that one (the
compiler drops it), but the gradient takes its way: so what is summed, over a batch, the rows of a look-up,
the steps of a loop or the devices of a mesh, is summed in float32. Products get derivatives of their own
(`_products`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jmp_policy import _again, _jax
from jmp_policy._autocast import _bind, _ops
from jmp_policy._jax import FLOAT32
from jmp_policy._weights._mark import is_marked
from jmp_policy._weights._products import joined, product

#: Of one array that may be a weight, and of others that are none.
_MOVES = frozenset(
    [
        *(name for name in _ops.MOVES if name not in ("name", "stop_gradient")),
        *("gather", "dynamic_slice", "sharding_constraint", "layout_constraint", "mesh_cast", "reshard"),
        *("all_gather", "all_gather_invariant"),
    ]
)

_PRODUCTS = frozenset(["dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"])

#: Name of autocast's products with a float32 result.
WIDENED = "product_with_float32_result"

#: Jits with at most so many operations are inlined.
_INLINED = 24


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weight:
    """A half value that is the cast of a float32 one.

    Args:
      half: the value.
      wide: the float32 parameter, or what was made of it by moving it about.
      is_looked_up: whether it is rows of a parameter: activations, whose products have half gradients, and
        which are added up where the rows were taken from.
    """

    half: Any
    wide: Any
    is_looked_up: bool = dataclasses.field(default=False, metadata={"static": True})

    def read(self) -> Any:
        """The half value, with its gradient."""
        return joined(self.half, self.wide)


def read(value: Any) -> Any:
    """A value as the program has it."""
    return value.read() if isinstance(value, Weight) else value


class Run:
    """One run of a program.

    Attributes:
      missed: where a weight gradient stays half, and why.
    """

    def __init__(self) -> None:
        self.missed: dict[str, str] = {}
        self._holds: dict[int, bool] = {}
        self._jits: dict[int, Any] = {}

    def evaluate(self, jaxpr: Any, values: Sequence[Any], stack: Any = None) -> list[Any]:
        """The results of a jaxpr for arrays and weights; some may be weights themselves.

        Args:
          jaxpr: closed or not.
          values: its arguments.
          stack: the name stack that its operations continue; the current one if left out.
        """
        opened = _jax.open_jaxpr(jaxpr)
        known = dict(zip(opened.invars, values, strict=True))
        known |= dict(zip(opened.constvars, _jax.constants(jaxpr), strict=True))
        # Half values that were computed from weights alone.
        derived: set[Any] = set()

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else known[atom]

        for eqn in opened.eqns:
            operands = [value_of(atom) for atom in eqn.invars]
            with _jax.at(eqn, None if stack is None else stack + eqn.source_info.name_stack):
                outs = self._one(eqn, operands)
            known.update(zip(eqn.outvars, outs, strict=True))
            self._watch(eqn, operands, derived)
        return [value_of(atom) for atom in opened.outvars]

    def function(self, jaxpr: Any) -> Callable[..., list[Any]]:
        """A jaxpr as a function of arrays and weights to arrays."""

        def call(*values: Any) -> list[Any]:
            with _bind.program(is_body=True):
                return list(map(read, self.evaluate(jaxpr, values)))

        return call

    def jitted(self, eqn: Any) -> Callable[..., list[Any]]:
        """`function` of a jit's jaxpr under `jax.jit`; the same object for the same jaxpr, traced once."""
        jaxpr = eqn.params["jaxpr"]
        if id(jaxpr) not in self._jits:
            function = self.function(jaxpr)
            function.__name__ = eqn.params["name"]
            # With what has that identity.
            self._jits[id(jaxpr)] = jaxpr, jax.jit(function)
        return self._jits[id(jaxpr)][1]

    def note(self, eqn: Any, why: str) -> None:
        """Writes down a weight gradient that stays half."""
        self.missed.setdefault(_jax.source_line(eqn) or "somewhere", why)

    def _one(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if is_marked(eqn):
            wide = read(operands[0])
            return [Weight(_bind.bind(eqn, lax.stop_gradient(wide))[0], wide)]
        weights = [isinstance(value, Weight) for value in operands]
        if not any(weights) and not self._holds_marks(eqn):
            return _bind.bind(eqn, *operands)
        name = eqn.primitive.name
        if name in _CALLS:
            return _CALLS[name](self, eqn, operands)
        if name in _PRODUCTS:
            return [_product(eqn, operands)]
        if (name in _MOVES and sum(weights) == weights[0]) or (name == "concatenate" and all(weights)):
            return _moved(eqn, operands, name == "gather" or operands[0].is_looked_up)
        if name == "optimization_barrier":
            kept = zip(_bind.bind(eqn, *map(_half, operands)), operands, weights, strict=True)
            return [dataclasses.replace(value, half=out) if weight else out for out, value, weight in kept]
        if name == "convert_element_type" and eqn.params["new_dtype"] == FLOAT32:
            # Rounded, with a gradient that is not.
            return [joined(_bind.bind(eqn, operands[0].half)[0], operands[0].wide)]
        if name in _ops.BROADCASTING:
            operands = [_broadcast(value, eqn.outvars[0]) for value in operands]
        return _bind.bind(eqn, *map(read, operands))

    def _holds_marks(self, eqn: Any) -> bool:
        return any(map(self._is_marked_inside, _jax.subjaxprs(eqn)))

    def _is_marked_inside(self, jaxpr: Any) -> bool:
        eqns = _jax.open_jaxpr(jaxpr).eqns
        if id(jaxpr) not in self._holds:
            self._holds[id(jaxpr)] = any(is_marked(eqn) or self._holds_marks(eqn) for eqn in eqns)
        return self._holds[id(jaxpr)]

    def _watch(self, eqn: Any, operands: Sequence[Any], derived: set[Any]) -> None:
        """Follows what is computed from weights alone, to say where it gets a half gradient."""
        is_weight = [isinstance(value, Weight) and not value.is_looked_up for value in operands]
        known = [not isinstance(atom, _jax.Literal) and atom in derived for atom in eqn.invars]
        if not any(is_weight) and not any(known):
            return
        if eqn.primitive.name in _PRODUCTS:
            if any(known):
                self.note(eqn, "the weight is computed with, in half precision, before this product")
            return
        if eqn.primitive.name in _CALLS or (any(is_weight) and _keeps_weights(eqn)):
            return
        scalars = [_jax.shape_of(atom) == () for atom in eqn.invars]
        if all(w or k or s for w, k, s in zip(is_weight, known, scalars, strict=True)):
            derived.update(eqn.outvars)


def _keeps_weights(eqn: Any) -> bool:
    return eqn.primitive.name in (*_MOVES, "concatenate", "optimization_barrier", "convert_element_type")


def _half(value: Any) -> Any:
    return value.half if isinstance(value, Weight) else value


def _moved(eqn: Any, operands: Sequence[Any], is_looked_up: bool) -> list[Any]:
    halves = _bind.bind(eqn, *map(_half, operands))
    wides = _bind.bind(eqn, *(value.wide if isinstance(value, Weight) else value for value in operands))
    return [Weight(half, wide, is_looked_up) for half, wide in zip(halves, wides, strict=True)]


def _broadcast(value: Any, like: Any) -> Any:
    """An operand of an operation that copies smaller ones: copied before, so that its gradient is summed."""
    if not isinstance(value, Weight) or value.half.shape == _jax.shape_of(like):
        return value
    half, wide = (_jax.broadcast_like(x, like) for x in (value.half, value.wide))
    return Weight(half, wide, value.is_looked_up)


def _product(eqn: Any, operands: Sequence[Any], cotangent: Any = None) -> Any:
    weights = [isinstance(value, Weight) and not value.is_looked_up for value in operands]
    values = [value.half if weight else read(value) for value, weight in zip(operands, weights, strict=True)]
    wide = [value.wide if weight else None for value, weight in zip(operands, weights, strict=True)]
    return product(eqn, values, wide, cotangent)


def _jit(run: Run, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    if any(eqn.params.get("donated_invars", ())) or _jax.has_shardings(eqn.params):
        return _closed(run, eqn, operands)
    if len(_jax.open_jaxpr(eqn.params["jaxpr"]).eqns) <= _INLINED:
        return run.evaluate(eqn.params["jaxpr"], operands)
    return run.jitted(eqn)(*operands)


def _inlined(parameter: str) -> Callable[..., Sequence[Any]]:
    return lambda run, eqn, operands: run.evaluate(eqn.params[parameter], operands)


def _checkpoint(run: Run, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    leaves, structure = jax.tree.flatten(list(operands))
    function = run.function(eqn.params["jaxpr"])
    flat = lambda *leaves: function(*jax.tree.unflatten(structure, leaves))  # noqa: E731
    return _again.checkpoint(eqn, flat, leaves, _bind.bind)


def _shard_map(run: Run, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    return _again.shard_map(eqn, run.function(eqn.params["jaxpr"]), operands)


def _scan(run: Run, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    consts, carries = _jax.scan_sizes(eqn.params)
    stop = consts + carries
    operands = [*operands[:consts], *map(read, operands[consts:stop]), *operands[stop:]]
    return _again.scan(eqn, run.function(eqn.params["jaxpr"]), operands)


def _cond(run: Run, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    if eqn.params.get("branches_platforms") is not None:
        return _closed(run, eqn, operands)
    return _again.cond(list(map(run.function, eqn.params["branches"])), operands)


def _custom_jvp(run: Run, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    inner = _jax.open_jaxpr(eqn.params["call_jaxpr"]).eqns
    if _jax.name_of(eqn) != WIDENED or len(inner) != 1:
        return _closed(run, eqn, operands)
    # Of autocast: a float32 result whose derivatives are half products.
    return [_product(inner[0], operands, inner[0].invars[0].aval.dtype)]


def _closed(run: Run, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """A call that brings its own derivative, has none, or cannot be made again."""
    name = eqn.primitive.name
    why = "which is bound to its shardings or donations" if name == "jit" else "whose derivative is given"
    if name != "while":
        run.note(eqn, f"the weight goes into a {name}, {why}")
    return _bind.bind(eqn, *map(read, operands))


_CALLS: dict[str, Callable[[Run, Any, Sequence[Any]], Sequence[Any]]] = {
    "jit": _jit,
    "closed_call": _inlined("call_jaxpr"),
    "core_call": _inlined("call_jaxpr"),
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "shard_map": _shard_map,
    "scan": _scan,
    "cond": _cond,
    "while": _closed,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _closed,
}
