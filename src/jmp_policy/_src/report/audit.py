"""Audits the jaxpr of a function: precision of products, silent upcasts, repeated casts, sums in half."""

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_floating, is_half, is_wide
from jmp_policy._src.jaxpr import compat, control_flow, ir, matrix_products, op_table, source_lines
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import Site, ValueInfo, Visitor, size, walk
from jmp_policy._src.products.fp8 import eligibility as fp8
from jmp_policy._src.report.audit_findings import Audit, HalfOperation, Product, RepeatedCast, Upcast
from jmp_policy._src.report.function import as_function, replaced
from jmp_policy._src.report.lost_constants import LostConstants, WideNumbers, without_overflow_warnings
from jmp_policy._src.report.trials import numbers_in_float32


def audit(fn: Callable[..., Any], *args: Any, grad: bool = False, **kwargs: Any) -> Audit:
    """Reports the precision of every product of a function, and what keeps it from half precision.

    The function is traced and nothing runs. Give it a training step, or a function that `jax.grad` is taken
    of inside, to see the backward pass.

    Args:
      fn: any function that `jax.jit` could trace, or one of NNX modules.
      args, kwargs: its arguments; `jax.ShapeDtypeStruct`s will do. Those that are not arrays are static.
      grad: audit the gradients of `fn`, a loss, with respect to its first argument too.

    Returns:
      An `Audit`; `print` shows it, `.verdict` is its last line.

    Raises:
      TypeError: when `fn` is not a function; with `grad`, when it does not return a scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> def mlp(w, v, x):
      ...     return (x.astype(jnp.float16) @ w.astype(jnp.float16)) @ v
      >>> found = audit(mlp, jnp.ones((16, 8)), jnp.ones((8, 8)), jnp.ones((8, 16)))
      >>> [(p.lhs, p.rhs, p.m, p.n, p.k) for p in found.products]
      [('float16', 'float16', 8, 8, 16), ('float16', 'float32', 8, 8, 8)]
    """
    function = as_function(fn, args, kwargs, "audit")
    if grad:
        function = _with_gradients(function)
    with without_overflow_warnings():
        jaxpr = function.jaxpr()
    in_float32 = functools.partial(numbers_in_float32, jaxpr, function.call, function.arrays)
    is_autocast = any(map(source_lines.is_of_autocast, ir.equations(jaxpr)))
    visitor = AuditVisitor([argument.path for argument in function.arguments], in_float32, is_autocast)
    walk(jaxpr, visitor)
    return visitor.audit(function.name)


def _with_gradients(function: Any) -> Any:
    trained = function.trained()

    def value_and_gradients(arrays: Sequence[Any]) -> Any:
        def loss(params: Sequence[Any]) -> Any:
            out = function.call(replaced(arrays, trained, params))
            result = out[0] if function.has_state else out
            value = result[0] if isinstance(result, tuple) else result
            if getattr(value, "shape", None) != ():
                raise TypeError(
                    f"audit(..., grad=True) needs a loss, a function that returns a scalar (or a pair of "
                    f"scalar and anything); {function.name} returns {jax.tree.map(jnp.shape, result)}."
                )
            return value, out

        return jax.value_and_grad(loss, has_aux=True)([arrays[i] for i in trained])

    return function._replace(call=value_and_gradients, has_state=False)


class AuditVisitor(Visitor):
    """Visitor of a jaxpr that collects products, upcasts, casts and half operations for an audit.

    The provenance of a value, which `marks` returns, is the set of silent upcasts that made it float32,
    and the first cast that was written: a product that reads the value is in float32 because of them.

    Of the upcasts that `autocast` makes, which look like promotions, those are silent that were for float32
    values which the model makes of no half ones.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        in_float32: Callable[[], WideNumbers] = WideNumbers,
        is_autocast: bool = False,
    ):
        self._arguments, self._is_autocast = list(arguments), is_autocast
        self._promoted: dict[int, tuple[Any, Site]] = {}
        #: Numbers, and arguments such as a bias, that autocast casts to half where nothing else is float32.
        self._not_promoting: set[int] = set()
        self._ids: dict[int, int] = {}
        self._upcasts: dict[int, Upcast] = {}
        self._written: dict[int, str] = {}
        self._reached: dict[int, list[str]] = defaultdict(list)
        self._products: list[tuple[Product, frozenset[int]]] = []
        self._casts: dict[Any, list[Any]] = defaultdict(list)
        self._half: list[HalfOperation] = []
        self._opaque = Counter[str]()
        self._uncounted = False
        self._constants = LostConstants(in_float32)
        self._sums = HalfSums()
        self._rounded = RoundedIntegers(arguments)
        self._upcast_ids: dict[int, int] = {}
        self._of_carries: set[int] = set()
        self._meets_carry: set[int] = set()

    def marks(self, eqn: Any, site: Site, operands: Sequence[ValueInfo]) -> frozenset[int]:
        if all(map(is_half, map(ir.dtype_of, eqn.outvars))):
            return frozenset()  # The results are half again.
        causes = frozenset().union(*(value.provenance for value in operands))
        silent = causes - self._written.keys()
        is_silent = _is_silent_upcast(eqn, site) and not self._is_autocast
        if is_silent or (_mixes(eqn) and not silent):
            return silent | {self._id(eqn)}
        is_widened = _is_upcast(eqn) or (self._is_autocast and _is_widening_product(eqn))
        if is_widened and not site.backward:
            self._written[self._id(eqn)] = site.place
            return frozenset([self._id(eqn)])
        return silent | set(sorted(causes - silent)[:1])

    def _id(self, eqn: Any) -> int:
        return self._ids.setdefault(id(eqn), len(self._ids))

    def see(self, eqn: Any, site: Site, operands: Sequence[ValueInfo], results: Sequence[ValueInfo]) -> None:
        name = eqn.primitive.name
        if name in _PRODUCTS:
            self._see_product(eqn, site, operands)
        elif name == "convert_element_type":
            self._see_cast(eqn, site, operands[0], results[0])
        elif name == "broadcast_in_dim" and (
            isinstance(eqn.invars[0], compat.Literal) or operands[0].origin is not None
        ):
            self._not_promoting.add(results[0].key)
        elif name in _KERNELS:
            self._opaque[name] += 1
        self._see_promoted(eqn, operands)
        self._see_carry(eqn, operands, results)
        self._see_half(eqn, site)
        for visitor in (self._constants, self._sums, self._rounded):
            visitor.see(eqn, site, operands, results)

    def loop(self, eqn: Any, site: Site) -> None:
        self._sums.loop(eqn, site)

    def _see_product(self, eqn: Any, site: Site, operands: Sequence[ValueInfo]) -> None:
        causes = operands[0].provenance | operands[1].provenance
        if _mixes(eqn) and not causes - self._written.keys():
            # JAX multiplies half by float32 without a conversion that would show in the jaxpr.
            self._note_upcast(eqn, site, *sorted(eqn.invars[:2], key=lambda v: v.aval.dtype.itemsize))
            causes = frozenset([self._id(eqn)])
        size = matrix_products.size_of(eqn)
        lhs, rhs = fp8.operand_dtypes(eqn)
        self._uncounted |= not site.counted
        product = Product(
            *(eqn.primitive.name, site.path, site.line, site.backward),
            *(lhs, rhs, str(ir.dtype_of(eqn.outvars[0]))),
            *(size.batch, size.m, size.n, size.k, site.times, size.flops * site.times),
            share=0.0,
            pad=matrix_products.padding(eqn, size),
            scales=fp8.recipe_of(eqn),
            stays=fp8.why_not(eqn, site.path),
        )
        # Causes are named at the end: in a loop one may come after the product that it reaches.
        self._products.append((product, causes))
        for cause in causes:
            self._reached[cause].append(site.place)

    def _note_upcast(self, eqn: Any, site: Site, before: Any, after: Any) -> None:
        narrow, wide, shape = ir.dtype_of(before), ir.dtype_of(after), tuple(ir.shape_of(before))
        self._upcasts[self._id(eqn)] = Upcast(site.path, site.line, str(narrow), str(wide), shape, ())

    def _see_cast(self, eqn: Any, site: Site, operand: ValueInfo, result: ValueInfo) -> None:
        (var,), (out,) = eqn.invars, eqn.outvars
        before, after = ir.dtype_of(var), ir.dtype_of(out)
        if not (is_floating(before) and is_floating(after)):
            return
        # XLA fuses the upcast of a computed value into the operations that read it.
        costs = operand.origin is not None or jnp.finfo(after).bits < jnp.finfo(before).bits
        if costs and before != after and size(var) > 1 and not isinstance(var, compat.Literal):
            cost = size(var) * np.dtype(before).itemsize
            # In a scan a value is another one on each trip, unless it comes from outside.
            times = site.times // operand.times
            self._casts[operand.key, str(after)].append((site, operand.origin, cost, times))
        if _is_silent_upcast(eqn, site) and self._is_autocast:
            self._promoted[result.key] = eqn, site
        elif _is_silent_upcast(eqn, site):
            self._note_upcast(eqn, site, var, out)

    def _see_promoted(self, eqn: Any, operands: Sequence[ValueInfo]) -> None:
        casts = [self._promoted[v.key] for v in operands if v.key in self._promoted]
        if not casts or op_table.LISTED.get(eqn.primitive.name, ("", ""))[0] != "follow":
            return
        pairs = zip(eqn.invars, operands, strict=True)
        wide = [v for atom, v in pairs if ir.is_float32(atom) and size(atom) > 1]
        if any(not v.provenance and v.key not in self._not_promoting for v in wide):
            for cast, site in casts:
                self._note_upcast(cast, site, cast.invars[0], cast.outvars[0])
                self._written.pop(self._id(cast), None)

    def _see_carry(self, eqn: Any, operands: Sequence[ValueInfo], results: Sequence[ValueInfo]) -> None:
        """Notes which upcasts meet a loop's float32 carry: a sum in float32, as it should be."""
        if id(eqn) in self._ids:
            self._upcast_ids[results[0].key] = self._ids[id(eqn)]
        pairs = list(zip(eqn.invars, operands, strict=True))
        if any((v.is_carry or v.key in self._of_carries) and ir.is_float32(atom) for atom, v in pairs):
            self._of_carries.update(info.key for info in results)
            self._meets_carry |= {self._upcast_ids[v.key] for v in operands if v.key in self._upcast_ids}

    def _see_half(self, eqn: Any, site: Site) -> None:
        name = eqn.primitive.name
        listed, why = op_table.LISTED.get(name, ("", ""))
        half = next(filter(is_half, map(ir.dtype_of, eqn.invars)), None)
        if listed == "full" and half is not None and any(map(size, eqn.invars)):
            self._half.append(_half_operation(name, site, half, why, sum_terms(eqn)))

    def audit(self, function: str) -> Audit:
        """The audit of everything visited so far."""
        total = sum(p.flops for p, _ in self._products)
        is_float8 = any(p.scales for p, _ in self._products)
        products = []
        for p, causes in self._products:
            share, stays = p.flops / total if total else 0.0, p.stays if is_float8 else ""
            products.append(dataclasses.replace(p, share=share, cause=self._places(causes), stays=stays))
        upcasts = tuple(
            dataclasses.replace(upcast, reaches=tuple(dict.fromkeys(self._reached[index])))
            for index, upcast in self._upcasts.items()
            if self._reached[index] or index not in self._meets_carry
        )
        return Audit(
            function=function,
            products=tuple(products),
            upcasts=upcasts,
            repeated_casts=tuple(self._repeated()),
            half_operations=(*self._half, *self._sums.found, *self._rounded.found),
            opaque=dict(self._opaque),
            flops=total,
            uncounted=self._uncounted,
            constants=self._constants.found(),
        )

    def _places(self, causes: Iterable[int]) -> str:
        silent = [self._upcasts[c].place for c in sorted(causes) if c in self._upcasts]
        return "; ".join(dict.fromkeys(silent or [self._written[c] for c in causes if c in self._written]))

    def _repeated(self) -> list[RepeatedCast]:
        found = []
        for (_, dtype), casts in self._casts.items():
            times = sum(times for *_, times in casts)
            if times < 2:
                continue
            _, origin, cost, _ = casts[0]
            value = "a computed value" if origin is None else str(self._arguments[origin])
            places = tuple(dict.fromkeys(site.place for site, *_ in casts))
            found.append(RepeatedCast(value, dtype, times, cost, places))
        return sorted(found, key=lambda cast: -cast.times * cast.size)


_PRODUCTS = HAVING[Trait.PRODUCT]

#: Kernels without a jaxpr, or with one that computes on parts of arrays.
_KERNELS = HAVING[Trait.KERNEL]


def _mixes(eqn: Any) -> bool:
    """Whether an equation is a product of a half value and one of more bits."""
    if eqn.primitive.name not in _PRODUCTS:
        return False
    dtypes = [ir.dtype_of(var) for var in eqn.invars[:2]]
    return any(map(is_half, dtypes)) and not all(is_half(d) or np.dtype(d).itemsize == 1 for d in dtypes)


def _is_silent_upcast(eqn: Any, site: Site) -> bool:
    # In a backward pass, an upcast is the transpose of a cast that was asked for.
    return not site.backward and _is_upcast(eqn) and source_lines.is_promotion(eqn)


def _is_upcast(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = ir.dtype_of(eqn.invars[0]), ir.dtype_of(eqn.outvars[0])
    return is_half(before) and is_wide(after) and size(eqn.invars[0]) > 1


def _is_widening_product(eqn: Any) -> bool:
    return eqn.primitive.name in _PRODUCTS and all(is_half(ir.dtype_of(var)) for var in eqn.invars[:2])


#: Sums are hardly worse than other operations in half whose number of terms times the dtype's epsilon is up
#: to this: 128 terms in float16, 16 in bfloat16.
_FEW = 1 / 8


class HalfSums(Visitor):
    """Finds sums in half precision that add one term after another: scatter-adds, and the carries of loops.

    XLA adds the terms of a `reduce_sum` or `cumsum` in parts, and then the parts: of 8192 equal float16 terms
    it loses 0.3 %. A scatter-add and a loop add one by one, and the sum stops growing once a term is less
    than half of its last digit: of those terms, two thirds are lost. (Both measured on a CPU.)
    """

    def __init__(self) -> None:
        self.found: list[HalfOperation] = []
        self._distinct: dict[int, int] = {}

    def see(self, eqn: Any, site: Site, operands: Sequence[ValueInfo], results: Sequence[ValueInfo]) -> None:
        """Takes note of an operation, as `Visitor.see`."""
        name = eqn.primitive.name
        if name in _SCATTERS and is_half(ir.dtype_of(eqn.outvars[0])):
            terms = max(scatter_terms(eqn, self._distinct_of(operands[1])), 1)
            self._add(name, site, ir.dtype_of(eqn.outvars[0]), terms, "a cast of what is added")
        elif name == "iota":
            self._distinct[results[0].key] = eqn.params["shape"][eqn.params["dimension"]]
        elif name in _KEEPS_DISTINCT and not is_half(ir.dtype_of(eqn.outvars[0])):
            counts = [self._distinct_of(info) for info in operands]
            if name in _ADDS and all(info.constant is None for info in operands):
                counts = []  # Only a shift keeps numbers apart: the length, for an index from the end.
            if max(counts, default=1) > 1:
                self._distinct[results[0].key] = max(counts)

    def loop(self, eqn: Any, site: Site) -> None:
        """Takes note of a loop, as `Visitor.loop`."""
        loop = control_flow.loop(eqn, eqn.invars)
        body, first, carries = compat.open_jaxpr(loop.body), len(loop.fixed), len(loop.start)
        starts = body.invars[first : first + carries]
        for start, end in zip(starts, body.outvars[:carries], strict=True):
            if is_half(ir.dtype_of(start)) and _adds_to(body, start, end):
                self._add(eqn.primitive.name, site, ir.dtype_of(start), loop.trips or 0, "a float32 carry")

    def _distinct_of(self, info: ValueInfo) -> int:
        """How many different numbers are known to be among the elements of a value."""
        constant = info.constant
        if constant is not None and not ir.is_traced(constant) and np.ndim(constant) == 1:
            return len(np.unique(np.asarray(constant))) if jnp.issubdtype(constant.dtype, jnp.integer) else 1
        return self._distinct.get(info.key, 1)

    def _add(self, name: str, site: Site, dtype: Any, terms: int, repair: str) -> None:
        if 0 < terms * float(jnp.finfo(dtype).eps) <= _FEW:
            return
        if site.backward:
            repair = "g=f32 in the policy (for an activation: a cast to float32 before it is read)"
        count = f"up to {terms} terms" if terms else "an unknown number of terms"
        why = f"adds {count} one after another: {repair} makes it a float32 sum"
        self.found.append(_half_operation(name, site, dtype, why, terms))


class RoundedIntegers(Visitor):
    """Finds integers made of an argument that was float32 and went through half precision: other numbers.

    Float16 holds the integers up to 2048, bfloat16 those up to 256.
    """

    def __init__(self, arguments: Sequence[str]):
        self.found: list[HalfOperation] = []
        self._arguments = arguments
        self._of_argument: dict[int, int] = {}
        self._rounded: dict[int, Any] = {}

    def see(self, eqn: Any, site: Site, operands: Sequence[ValueInfo], results: Sequence[ValueInfo]) -> None:
        """Takes note of an operation, as `Visitor.see`."""
        if eqn.primitive.name not in _KEEPS_NUMBERS:
            return
        for atom, operand in zip(eqn.invars, operands, strict=True):
            before, after = ir.dtype_of(atom), ir.dtype_of(eqn.outvars[0])
            argument = self._of_argument.get(operand.key, operand.origin)
            if argument is None or not jnp.issubdtype(before, jnp.floating):
                continue
            self._of_argument.update((info.key, argument) for info in results)
            half = self._rounded.get(operand.key, after if is_half(after) and not is_half(before) else None)
            if half is None:
                continue
            self._rounded.update((info.key, half) for info in results)
            if eqn.primitive.name == "convert_element_type" and jnp.issubdtype(after, jnp.integer):
                why = (
                    f"makes integers of {self._arguments[argument]!r} after it was rounded: pass integers, "
                    "or give the module float32 by a rule"
                )
                self.found.append(_half_operation(eqn.primitive.name, site, half, why))


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


_SCATTERS, _VIEWS, _ADDS = map(HAVING.__getitem__, (Trait.SCATTER_SUM, Trait.VIEW, Trait.ADDITION))

#: Operations that give the numbers of their operands, or whole ones next to them.
_KEEPS_NUMBERS = _VIEWS | HAVING[Trait.EXACT] | HAVING[Trait.DECIDES]

#: Operations between the making of an index and its use.
_KEEPS_DISTINCT = _VIEWS | _ADDS | {"select_n", "concatenate"}
