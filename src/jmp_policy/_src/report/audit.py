"""Audits the jaxpr of a function: precision of products, silent upcasts, sums in half."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half, is_wide
from jmp_policy._src.jaxpr import (
    ir,
    matrix_products,
    source_lines,
)
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import Operation, Site, ValueInfo, Walk, size
from jmp_policy._src.products.fp8 import eligibility as fp8
from jmp_policy._src.report.audit_findings import (
    AUTOCAST,
    OPTAX,
    Audit,
    Product,
    Upcast,
    of_few_terms,
)
from jmp_policy._src.report.function import as_function
from jmp_policy._src.report.half_operations import half_operations
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
    return Audit(
        function=function,
        products=tuple(products),
        upcasts=tuple(walk.upcasts()),
        half_operations=half_operations(operations, walk.seen, arguments),
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
        is_silent = not is_meant and _is_upcast(eqn) and source_lines.is_promotion(eqn)
        return is_silent and not source_lines.is_of_update(eqn)

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


_PRODUCTS = HAVING[Trait.PRODUCT]

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
