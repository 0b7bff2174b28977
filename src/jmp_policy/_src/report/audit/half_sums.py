"""Finds sums in half precision that add one term after another: scatter-adds, and the carries of loops.

XLA adds the terms of a `reduce_sum` or `cumsum` in parts, and then the parts: of 8192 equal float16 terms it
loses 0.3 %. A scatter-add and a loop add one by one, and the sum stops growing once a term is less than half
of its last digit: of those terms, two thirds are lost. (Both measured on a CPU.)
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import calls, compat, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.op_table import Trait, having
from jmp_policy._src.jaxpr.walk import Site, ValueInfo
from jmp_policy._src.report.audit.findings import HalfOperation

#: Shorter sums lose no more than other operations in half do.
_FEW_TERMS = 16


class HalfSums:
    """Collects such sums from the operations and loops that a walk sees."""

    def __init__(self) -> None:
        self.found: list[HalfOperation] = []
        self._distinct: dict[int, int] = {}

    def see(self, eqn: Any, site: Site, operands: Sequence[ValueInfo], results: Sequence[ValueInfo]) -> None:
        """Takes note of an operation, as `Visitor.see`."""
        name = eqn.primitive.name
        if name in _SCATTERS and is_half(ir.dtype_of(eqn.outvars[0])):
            terms = scatter_terms(eqn, self._distinct_of(operands[1]))
            if terms > _FEW_TERMS:
                repair = "grad=float32 (g=f32) in the policy" if site.backward else "a cast of what is added"
                self._add(name, site, ir.dtype_of(eqn.outvars[0]), terms, repair)
        elif name == "iota":
            self._distinct[results[0].key] = eqn.params["shape"][eqn.params["dimension"]]
        elif name in _KEEPS_DISTINCT and not is_half(ir.dtype_of(eqn.outvars[0])):
            counts = [self._distinct_of(info) for info in operands]
            if name in ("add", "sub") and all(info.constant is None for info in operands):
                counts = []  # Only a shift keeps numbers apart: the length, for an index from the end.
            if max(counts, default=1) > 1:
                self._distinct[results[0].key] = max(counts)

    def loop(self, eqn: Any, site: Site) -> None:
        """Takes note of a loop, as `Visitor.loop`."""
        is_scan = calls.kind_of(eqn) is Kind.SCAN
        if is_scan:
            jaxpr, (first, carries) = eqn.params["jaxpr"], compat.scan_sizes(eqn.params)
            terms = eqn.params["length"]
        else:
            jaxpr, first, terms = eqn.params["body_jaxpr"], eqn.params["body_nconsts"], 0
            carries = len(eqn.outvars)
        if is_scan and terms <= _FEW_TERMS:
            return
        opened = compat.open_jaxpr(jaxpr)
        starts = opened.invars[first : first + carries]
        for start, end in zip(starts, opened.outvars[:carries], strict=True):
            if is_half(ir.dtype_of(start)) and _adds_to(opened, start, end):
                self._add("scan" if is_scan else "while", site, ir.dtype_of(start), terms, "a float32 carry")

    def _distinct_of(self, info: ValueInfo) -> int:
        """Returns how many different numbers are known to be among the elements of a value."""
        constant = info.constant
        if constant is not None and not ir.is_traced(constant) and np.ndim(constant) == 1:
            return len(np.unique(np.asarray(constant))) if jnp.issubdtype(constant.dtype, jnp.integer) else 1
        return self._distinct.get(info.key, 1)

    def _add(self, name: str, site: Site, dtype: Any, terms: int, repair: str) -> None:
        count = f"up to {terms} terms" if terms else "an unknown number of terms"
        why = f"adds {count} one after another: {repair} makes it a float32 sum"
        self.found.append(
            HalfOperation(name, site.path, site.line, site.backward, str(dtype), site.times, why, terms)
        )


def scatter_terms(eqn: Any, distinct: int = 1) -> int:
    """Returns how many rows a scatter-add may add to the same one.

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
    """Returns how many terms make one element of a sum over axes or windows; 0 for other operations."""
    name, params = eqn.primitive.name, eqn.params
    if name == "reduce_sum":
        shape = ir.shape_of(eqn.invars[0])
        return math.prod(shape[axis] for axis in params["axes"])
    if name == "cumsum":
        return ir.shape_of(eqn.invars[0])[params["axis"]]
    return math.prod(params["window_dimensions"]) if name == "reduce_window_sum" else 0


def _adds_to(jaxpr: Any, start: Any, end: Any) -> bool:
    """Returns whether a value is another one plus terms that do not depend on it."""
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    depends = {start}
    for eqn in jaxpr.eqns:
        if any(atom in depends for atom in eqn.invars if not isinstance(atom, compat.Literal)):
            depends.update(eqn.outvars)
    has_added = False
    while end is not start:
        eqn = None if isinstance(end, compat.Literal) else makers.get(end)
        if eqn is None:
            return False
        following = [a for a in eqn.invars if not isinstance(a, compat.Literal) and a in depends]
        is_sum = eqn.primitive.name in ("add", "add_any", "sub")
        # A residual stream adds what it computes from itself: no sum of many terms.
        if len(following) != 1 or not (is_sum or eqn.primitive.name in _VIEWS):
            return False
        has_added = has_added or (is_sum and is_half(ir.dtype_of(eqn.outvars[0])))
        end = following[0]
    return has_added


_SCATTERS = frozenset({"scatter-add", "scatter_add"})
_VIEWS = having(Trait.VIEW)

#: Operations between the making of an index and its use.
_KEEPS_DISTINCT = _VIEWS | {"select_n", "concatenate", "add", "sub"}
