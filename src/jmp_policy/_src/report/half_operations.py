"""Finds what is in half precision and belongs in float32: sums, exponentials, integers, parameters."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.half_params.half_weights import master_weights
from jmp_policy._src.jaxpr import compat, control_flow, ir, jax_sources, op_table
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.source_lines import is_in_file_of, is_of_update
from jmp_policy._src.jaxpr.walk import Operation, Site, ValueInfo, size
from jmp_policy._src.report.audit_findings import HalfOperation


def half_operations(
    operations: Sequence[Operation], seen: Sequence[Operation], arguments: Sequence[str]
) -> tuple[HalfOperation, ...]:
    """Finds all of them: in the operations without loops, and in `seen`, which has loops too."""
    return (
        *listed(operations),
        *half_sums(seen),
        *rounded_integers(operations, arguments),
        *half_draws(operations),
        *rounded_parameters(operations),
    )


def listed(operations: Sequence[Operation]) -> Iterator[HalfOperation]:
    """Finds operations in half precision that are listed for float32."""
    for eqn, site, *_ in operations:
        name = eqn.primitive.name
        where, why = op_table.LISTED.get(name, ("", ""))
        half = next(filter(is_half, map(ir.dtype_of, eqn.invars)), None)
        terms = sum_terms(eqn)  # A sum of one term is that term.
        if where == "full" and half is not None and any(map(size, eqn.invars)) and terms != 1:
            if why.startswith("as "):
                _, why = op_table.LISTED.get(why.split()[1], ("", why))
            yield _half_operation(name, site, half, why, terms)


#: Sums are hardly worse than other operations in half whose number of terms times the dtype's epsilon is up
#: to this: 128 terms in float16, 16 in bfloat16.
_FEW = 1 / 8

#: What makes the gradient of an array that is read in several places a float32 sum.
_OF_WEIGHT, _OF_ACTIVATION = "g=f32 in the policy", "a cast to float32 before it is read"


def half_sums(operations: Sequence[Operation]) -> Iterator[HalfOperation]:
    """Finds sums in half precision that add one term after another: scatter-adds, and the carries of loops.

    XLA adds the terms of a `reduce_sum` or `cumsum` in parts, and then the parts: of 8192 equal float16 terms
    it loses 0.3 %. A scatter-add and a loop add one by one, and the sum stops growing once a term is less
    than half of its last digit: of those terms, two thirds are lost. (Both measured on a CPU. There a sum
    over several axes is added one by one too, as the gradient of a convolution's bias; not so on a GPU.)
    """
    distinct, of_activations = dict[int, int](), _read_in_backward_pass(operations)

    def distinct_of(info: ValueInfo) -> int:
        """How many different numbers are known to be among the elements of a value."""
        constant = info.constant
        if constant is None or ir.is_traced(constant) or not np.ndim(constant):
            return distinct.get(info.key, 1)
        if not jnp.issubdtype(constant.dtype, jnp.integer):
            return 1
        # Columns, since the last axis may be that of the parts of an index.
        columns = np.reshape(constant, (-1, 1 if np.ndim(constant) == 1 else np.shape(constant)[-1])).T
        return max(len(np.unique(column)) for column in columns) if columns.size else 1

    for operation in operations:
        (eqn, site, operands, results), name = operation, operation.eqn.primitive.name
        sums = list[tuple[Any, int, str]]()
        if operation.is_loop:
            sums = [(dtype, trips, "a float32 carry") for dtype, trips in _summed_carries(eqn)]
        elif name in _SCATTERS and is_half(ir.dtype_of(eqn.outvars[0])):
            terms = max(scatter_terms(eqn, distinct_of(operands[1])), 1)
            sums = [(ir.dtype_of(eqn.outvars[0]), terms, "a cast of what is added")]
        elif name == "iota":
            distinct[results[0].key] = eqn.params["shape"][eqn.params["dimension"]]
        elif name in _KEEPS_DISTINCT and not is_half(ir.dtype_of(eqn.outvars[0])):
            counts = [distinct_of(info) for info in operands]
            if name in _ADDS and all(info.constant is None for info in operands):
                counts = []  # Only a shift keeps numbers apart: the length, for an index from the end.
            if max(counts, default=1) > 1:
                distinct[results[0].key] = max(counts)
        for dtype, terms, repair in sums:
            if not 0 < terms * float(jnp.finfo(dtype).eps) <= _FEW:
                if site.backward and operation.is_loop:  # Of its results no readers are known.
                    repair = f"{_OF_WEIGHT} (for an activation: {_OF_ACTIVATION})"
                elif site.backward:
                    repair = _OF_ACTIVATION if results[0].key in of_activations else _OF_WEIGHT
                count = f"up to {terms} terms" if terms else "an unknown number of terms"
                why = f"adds {count} one after another: {repair} makes it a float32 sum"
                yield _half_operation(name, site, dtype, why, terms)


def _read_in_backward_pass(operations: Sequence[Operation]) -> set[int]:
    """The keys of half values that the backward pass goes on with: no gradients of weights, which end it."""
    source, found = dict[int, int](), set[int]()
    for eqn, site, operands, results in operations:
        if eqn.primitive.name in _VIEWS and len(operands) == 1:
            source[results[0].key] = source.get(operands[0].key, operands[0].key)
        elif site.backward:
            pairs = zip(eqn.invars, operands, strict=False)  # Of loops there are none.
            found.update(source.get(info.key, info.key) for atom, info in pairs if is_half(ir.dtype_of(atom)))
    return found


def _summed_carries(eqn: Any) -> Iterator[tuple[Any, int]]:
    """The dtype of each carry of a loop that is a sum in half, and its number of terms; 0 if unknown."""
    loop = control_flow.loop(eqn, eqn.invars)
    body, first, carries = compat.open_jaxpr(loop.body), len(loop.fixed), len(loop.start)
    starts = body.invars[first : first + carries]
    for start, end in zip(starts, body.outvars[:carries], strict=True):
        if is_half(ir.dtype_of(start)) and _adds_to(body, start, end):
            yield ir.dtype_of(start), loop.trips or 0


def rounded_integers(operations: Sequence[Operation], arguments: Sequence[str]) -> Iterator[HalfOperation]:
    """Finds integers of 16 bits or more made of computed half values, or of an argument that was rounded.

    They are other numbers above 2048 in float16, and above 256 in bfloat16.
    """
    of_argument, rounded = dict[int, int](), dict[int, Any]()
    for eqn, site, operands, results in operations:
        if eqn.primitive.name not in _KEEPS_NUMBERS:
            continue
        for atom, operand in zip(eqn.invars, operands, strict=True):
            before, after = ir.dtype_of(atom), ir.dtype_of(eqn.outvars[0])
            if not jnp.issubdtype(before, jnp.floating):
                continue
            argument = of_argument.get(operand.key, operand.origin)
            half = rounded.get(operand.key)
            if argument is not None:
                half = half or (after if is_half(after) and not is_half(before) else None)
                of_argument.update((info.key, argument) for info in results)
                rounded.update((info.key, half) for info in results if half is not None)
            is_cast = eqn.primitive.name == "convert_element_type" and jnp.issubdtype(after, jnp.integer)
            is_computed = argument is None and is_half(before)
            if not is_cast or jnp.iinfo(after).bits == 8 or not (half or is_computed):
                continue
            most = 2 ** (jnp.finfo(half or before).nmant + 1)
            of, repair = f"numbers that are whole up to {most}", "compute them in float32"
            if half is not None and argument is not None:
                of, repair = f"{arguments[argument]!r} after it was rounded", "pass integers"
                repair += ", or give the module float32 by a rule"
            why = f"makes integers of {of}: {repair}"
            yield _half_operation(eqn.primitive.name, site, half or before, why)


def half_draws(operations: Sequence[Operation]) -> Iterator[HalfOperation]:
    """Finds random numbers that are drawn in half: uniform ones have as many values as the dtype has digits.

    `jax.random.categorical` draws in the dtype of its logits. Of 32 equal ones in bfloat16 it takes the first
    1.3 times as often as the last.
    """
    for eqn, site, *_ in operations:
        if eqn.primitive.name != "bitcast_convert_type":
            continue
        dtype = ir.dtype_of(eqn.outvars[0])
        if is_half(dtype) and jax_sources.is_drawn(eqn):
            count = 2 ** jnp.finfo(dtype).nmant
            why = f"draws one of {count} numbers: draw in float32 (categorical: by float32 logits)"
            yield _half_operation("jax.random", site, dtype, why)


#: The repair of parameters in half.
_MASTERS = "keep it in float32, or wrap the optimizer in master_weights"


def rounded_parameters(operations: Sequence[Operation]) -> Iterator[HalfOperation]:
    """Finds parameters in half that updates are added to, unless a wrapper keeps what rounding loses.

    Updates that are zero, as those of frozen parameters, lose nothing.
    """
    widened, zeros, found = dict[int, Any](), set[int](), list[HalfOperation]()
    for eqn, site, operands, results in operations:
        name, dtypes = eqn.primitive.name, list(map(ir.dtype_of, eqn.invars))
        if name == "convert_element_type" and is_half(dtypes[0]) and is_of_update(eqn):
            widened[results[0].key] = dtypes[0]
        elif name in _VIEWS or name == "select_n":
            if all(_is_zero(info) or info.key in zeros for info in operands[name == "select_n" :]):
                zeros.add(results[0].key)
        elif name in _ADDS and not any(info.key in zeros for info in operands):
            before = [widened.get(info.key, dtype) for info, dtype in zip(operands, dtypes, strict=True)]
            half = next(filter(is_half, before), None)
            if half is not None and is_of_update(eqn):
                least = round(4 / float(jnp.finfo(half).eps))
                why = f"rounds away updates below 1/{least} of a parameter: {_MASTERS}"
                found.append(_half_operation("optax.apply_updates", site, half, why))
    if found and not any(is_in_file_of(operation.eqn, master_weights) for operation in operations):
        yield from found


def _is_zero(info: ValueInfo) -> bool:
    known = info.constant
    return known is not None and not ir.is_traced(known) and not np.any(np.asarray(known))


def _half_operation(name: str, site: Site, dtype: Any, why: str, terms: int = 0) -> HalfOperation:
    return HalfOperation(name, site.path, site.line, site.backward, str(dtype), site.times, why, terms)


def scatter_terms(eqn: Any, distinct: int = 1) -> int:
    """How many rows a scatter-add may add to the same one.

    Args:
      eqn: its equation.
      distinct: how many different numbers are known to be among its indices.
    """
    if eqn.params.get("unique_indices"):
        return 1
    shape = ir.shape_of(eqn.invars[1])
    batch = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    rows = math.prod(size for axis, size in enumerate(shape[:-1]) if axis not in batch)
    return rows // max(distinct, 1)


def sum_terms(eqn: Any) -> int:
    """How many terms make one element of a sum over axes or windows; 0 for other operations."""
    name, params = eqn.primitive.name, eqn.params
    if name == "reduce_sum":
        shape = ir.shape_of(eqn.invars[0])
        return math.prod(shape[axis] for axis in params["axes"])
    if name == "cumsum":
        return ir.shape_of(eqn.invars[0])[params["axis"]]
    return math.prod(params["window_dimensions"]) if name == "reduce_window_sum" else 0


def _adds_to(jaxpr: Any, start: Any, end: Any) -> bool:
    """Whether a value is another one plus terms that do not depend on it."""
    depends, sums = {start}, {start: False}
    for eqn in jaxpr.eqns:
        following = [a for a in eqn.invars if not isinstance(a, compat.Literal) and a in depends]
        depends.update(eqn.outvars if following else ())
        is_sum = eqn.primitive.name in _ADDS
        # A residual stream adds what it computes from itself: no sum of many terms.
        if len(following) == 1 and following[0] in sums and (is_sum or eqn.primitive.name in _VIEWS):
            (out,) = eqn.outvars
            sums[out] = sums[following[0]] or (is_sum and is_half(ir.dtype_of(out)))
    return not isinstance(end, compat.Literal) and sums.get(end, False)


_SCATTERS, _VIEWS = HAVING[Trait.SCATTER_SUM], HAVING[Trait.VIEW]
_ADDS, _JOINS = HAVING[Trait.ADDITION], HAVING[Trait.JOINS]

#: Operations that give the numbers of their operands, or whole ones next to them.
_KEEPS_NUMBERS = _VIEWS | HAVING[Trait.EXACT] | HAVING[Trait.DECIDES]

#: Operations between the making of an index and its use.
_KEEPS_DISTINCT = _VIEWS | _ADDS | _JOINS | {"select_n"}
