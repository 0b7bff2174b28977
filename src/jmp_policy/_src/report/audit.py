"""Audits the jaxpr of a function: precision of products, silent upcasts, sums in half."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half, is_wide
from jmp_policy._src.jaxpr import (
    compat,
    control_flow,
    ir,
    jax_sources,
    matrix_products,
    op_table,
    source_lines,
)
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import Operation, Site, ValueInfo, Walk, size
from jmp_policy._src.products.fp8 import eligibility as fp8
from jmp_policy._src.report.audit_findings import (
    AUTOCAST,
    OPTAX,
    Audit,
    HalfOperation,
    Product,
    Upcast,
    of_few_terms,
)
from jmp_policy._src.report.function import as_function
from jmp_policy._src.report.lost_constants import (
    LostConstant,
    lost_constants_of,
    without_overflow_warnings,
)


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
        function = function.with_gradients()
    with without_overflow_warnings():
        jaxpr = function.jaxpr()
    constants = lost_constants_of(jaxpr, function.call, function.arrays).found()
    arguments = [argument.path for argument in function.arguments]
    return audit_of(function.name, jaxpr, arguments, constants)


def audit_of(
    function: str,
    jaxpr: Any,
    arguments: Sequence[str],
    constants: tuple[LostConstant, ...] = (),
) -> Audit:
    """Audits a closed jaxpr.

    Args:
      function, arguments: names of the function and its arguments.
      jaxpr: the program.
      constants: that half precision makes infinite, zero or one.
    """
    walk = _AuditWalk(jaxpr)
    operations, products = walk.operations, walk.products()
    names = [operation.eqn.primitive.name for operation in operations]
    sums, integers = half_sums(walk.seen), rounded_integers(operations, arguments)
    return Audit(
        function=function,
        products=tuple(products),
        upcasts=tuple(walk.upcasts()),
        half_operations=(*half_operations(operations), *sums, *integers, *half_draws(operations)),
        opaque=dict(Counter(filter(_KERNELS.__contains__, names))),
        flops=sum(p.flops for p in products),
        uncounted=any(o.eqn.primitive.name in _PRODUCTS and not o.site.counted for o in operations),
        constants=constants,
    )


class _AuditWalk(Walk):
    """Collects products, and the upcasts that reach them.

    The provenance of a value, which `marks` returns, is the set of silent upcasts that made it float32,
    and the first cast that was written: a product that reads the value is in float32 because of them.

    Upcasts that `autocast` makes look like promotions, and it casts the operands of products to half again:
    where it is used, no conversion counts as a silent upcast.
    """

    def __init__(self, jaxpr: Any):
        self._has_autocast = any(map(source_lines.is_of_autocast, ir.equations(jaxpr)))
        self._ids: dict[Any, int] = {}
        self._upcasts: dict[int, Upcast] = {}
        self._written: dict[int, str] = {}
        self._products: list[tuple[Product, frozenset[int]]] = []
        super().__init__(jaxpr)

    def marks(self, eqn: Any, site: Site, operands: Sequence[ValueInfo]) -> frozenset[int]:
        if all(map(is_half, map(ir.dtype_of, eqn.outvars))):
            return frozenset()  # The results are half again.
        causes = frozenset().union(*(value.provenance for value in operands))
        silent = causes - self._written.keys()
        if site.backward and eqn.primitive.name in _SPARSE_PRODUCTS:
            # JAX's cotangent of a half factor has the dtype of the result.
            return silent | {i for i, upcast in self._upcasts.items() if upcast.place == site.place}
        if self._is_silent_upcast(eqn, site) or (_mixes(eqn) and not silent):
            return silent | {self._id(eqn)}
        if _is_upcast(eqn) and not site.backward:
            self._written[self._id(eqn)] = site.place
            return frozenset([self._id(eqn)])
        return silent | set(sorted(causes - silent)[:1])

    def _is_silent_upcast(self, eqn: Any, site: Site) -> bool:
        # In a backward pass, an upcast is the transpose of a cast that was asked for.
        is_meant = site.backward or self._has_autocast
        return not is_meant and _is_upcast(eqn) and source_lines.is_promotion(eqn)

    def _id(self, eqn: Any) -> int:
        return self._ids.setdefault(eqn, len(self._ids))

    def see(self, operation: Operation) -> None:
        super().see(operation)
        if operation.is_loop:
            return
        eqn, site, operands, _ = operation
        if eqn.primitive.name in _PRODUCTS:
            self._see_product(eqn, site, operands)
        elif self._is_silent_upcast(eqn, site):
            self._note_upcast(eqn, site, eqn.invars[0], eqn.outvars[0])
        elif _mixes(eqn):
            self._note_upcast(eqn, site, *_by_width(eqn))

    def _see_product(self, eqn: Any, site: Site, operands: Sequence[ValueInfo]) -> None:
        causes = operands[0].provenance | operands[1].provenance
        if _mixes(eqn) and not causes - self._written.keys():
            # JAX multiplies half by float32 without a conversion that would show in the jaxpr.
            self._note_upcast(eqn, site, *_by_width(eqn))
            causes = frozenset([self._id(eqn)])
        is_half_product = all(map(is_half, map(ir.dtype_of, eqn.invars[:2])))
        cause = ""
        if not is_half_product and source_lines.is_written_in(eqn, "optax"):
            cause = OPTAX
        elif not is_half_product and self._has_autocast:
            cause = AUTOCAST  # It lowers products whatever their operands are, or leaves them.
        if cause:
            causes = frozenset()
        size = matrix_products.size_of(eqn)
        lhs, rhs = fp8.operand_dtypes(eqn)
        product = Product(
            *(eqn.primitive.name, site.path, site.line, site.backward),
            *(lhs, rhs, str(ir.dtype_of(eqn.outvars[0]))),
            *(size.batch, size.m, size.n, size.k, site.times, size.flops * site.times),
            share=0.0,
            pad=matrix_products.padding(eqn, size),
            scales=fp8.recipe_of(eqn),
            stays=fp8.why_not(eqn, site.path),
            cause=cause,
            precision=ir.asked_precision(eqn),
        )
        # Causes are named at the end: in a loop one may come after the product that it reaches.
        self._products.append((product, causes))

    def _note_upcast(self, eqn: Any, site: Site, before: Any, after: Any) -> None:
        narrow, wide, shape = ir.dtype_of(before), ir.dtype_of(after), tuple(ir.shape_of(before))
        self._upcasts[self._id(eqn)] = Upcast(site.path, site.line, str(narrow), str(wide), shape, ())

    def products(self) -> list[Product]:
        """The products, with their shares of the FLOPs, and why they are not in half."""
        flops = sum(p.flops for p, _ in self._products)
        is_float8, found = any(p.scales for p, _ in self._products), list[Product]()
        for p, causes in self._products:
            share, stays = p.flops / flops if flops else 0.0, p.stays if is_float8 else ""
            cause = p.cause or ("" if p in self._of_few_terms else self._places(causes))
            found.append(dataclasses.replace(p, share=share, cause=cause, stays=stays))
        return found

    def upcasts(self) -> Iterator[Upcast]:
        """The silent upcasts with what they reach.

        But for those that only meet a loop's float32 sum, and those for products of few terms, which are in
        float32 as they should be.
        """
        few, left_out = self._of_few_terms, self._meeting_carries() | self._for_products_of_few_terms()
        for index, upcast in self._upcasts.items():
            reaches = dict.fromkeys(
                p.place for p, causes in self._products if index in causes and p not in few
            )
            if reaches or index not in left_out:
                yield dataclasses.replace(upcast, reaches=tuple(reaches))

    @functools.cached_property
    def _of_few_terms(self) -> set[Product]:
        return of_few_terms([p for p, _ in self._products if not p.is_half])

    def _for_products_of_few_terms(self) -> set[int]:
        """The upcasts in products of few terms, and those of which nothing but such products is made."""
        upcasts, inside, others = dict[int, int](), set[int](), set[int]()
        places = {p.place for p in self._of_few_terms}
        for eqn, site, operands, results in self.operations:
            is_few = eqn.primitive.name in _PRODUCTS and site.place in places
            (inside if is_few else others).update(upcasts[v.key] for v in operands if v.key in upcasts)
            if eqn in self._ids and is_few:
                inside.add(self._id(eqn))
            elif eqn in self._ids:
                upcasts[results[0].key] = self._id(eqn)
        return inside - others

    def _meeting_carries(self) -> set[int]:
        """The upcasts that meet a loop's float32 carry: a sum in float32, as it should be."""
        upcasts, of_carries, found = dict[int, int](), set[int](), set[int]()
        for eqn, _, operands, results in self.operations:
            if eqn in self._ids:
                upcasts[results[0].key] = self._id(eqn)
            pairs = zip(eqn.invars, operands, strict=True)
            if any((v.is_carry or v.key in of_carries) and ir.is_float32(atom) for atom, v in pairs):
                of_carries.update(info.key for info in results)
                found |= {upcasts[v.key] for v in operands if v.key in upcasts}
        return found

    def _places(self, causes: Iterable[int]) -> str:
        silent = [self._upcasts[c].place for c in sorted(causes) if c in self._upcasts]
        return "; ".join(dict.fromkeys(silent or [self._written[c] for c in causes if c in self._written]))


_PRODUCTS, _VIEWS = HAVING[Trait.PRODUCT], HAVING[Trait.VIEW]

#: Whose FLOPs are not counted.
_SPARSE_PRODUCTS = {"bcoo_dot_general", "bcsr_dot_general"}

#: Kernels without a jaxpr, or with one that computes on parts of arrays.
_KERNELS = HAVING[Trait.KERNEL]


def _mixes(eqn: Any) -> bool:
    """Whether an equation is a product of a half value and one of more bits."""
    if eqn.primitive.name not in _PRODUCTS | _SPARSE_PRODUCTS:
        return False
    dtypes = [ir.dtype_of(var) for var in _by_width(eqn)]
    return any(map(is_half, dtypes)) and not all(is_half(d) or np.dtype(d).itemsize == 1 for d in dtypes)


def _by_width(eqn: Any) -> list[Any]:
    """The two factors of a product, the one with fewer bits first."""
    factors = [v for v in eqn.invars if jnp.issubdtype(ir.dtype_of(v), jnp.inexact)]  # No indices.
    return sorted(factors[:2], key=lambda v: v.aval.dtype.itemsize)


def _is_upcast(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = ir.dtype_of(eqn.invars[0]), ir.dtype_of(eqn.outvars[0])
    return is_half(before) and is_wide(after) and size(eqn.invars[0]) > 1


def half_operations(operations: Sequence[Operation]) -> Iterator[HalfOperation]:
    """Finds operations in half precision that are listed for float32."""
    for eqn, site, *_ in operations:
        name = eqn.primitive.name
        listed, why = op_table.LISTED.get(name, ("", ""))
        half = next(filter(is_half, map(ir.dtype_of, eqn.invars)), None)
        terms = sum_terms(eqn)  # A sum of one term is that term.
        if listed == "full" and half is not None and any(map(size, eqn.invars)) and terms != 1:
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
        if constant is not None and not ir.is_traced(constant) and np.ndim(constant) == 1:
            return len(np.unique(np.asarray(constant))) if jnp.issubdtype(constant.dtype, jnp.integer) else 1
        return distinct.get(info.key, 1)

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


_SCATTERS = HAVING[Trait.SCATTER_SUM]
_ADDS, _JOINS = HAVING[Trait.ADDITION], HAVING[Trait.JOINS]

#: Operations that give the numbers of their operands, or whole ones next to them.
_KEEPS_NUMBERS = _VIEWS | HAVING[Trait.EXACT] | HAVING[Trait.DECIDES]

#: Operations between the making of an index and its use.
_KEEPS_DISTINCT = _VIEWS | _ADDS | _JOINS | {"select_n"}
