"""Defines the findings of an audit, and shows them as tables."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.report_base import (
    Report,
    Sum,
    Table,
    count_text,
    joined,
    joined_places,
    percent,
)
from jmp_policy._src.core.tables import without_numbers
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import Placed, PlacedOperation
from jmp_policy._src.policy.module_precision import LEAST_TERMS
from jmp_policy._src.report import lost_constants

#: Products with a size of 1 in `Product.pad`, and what is said of them.
_ONE = re.compile(r" 1(?:,|$)")
_VECTORS = "with a size of 1, where padding does not help"


#: The cause of float32 products of a program with autocast, and of those of an optimizer.
AUTOCAST, OPTAX = "autocast", "optax"


@dataclasses.dataclass(frozen=True)
class Product(PlacedOperation):
    """Matrix product or convolution.

    Args:
      operation: name of the primitive.
      path: names of the scopes around it, joined by slashes: modules of Flax and Haiku, named scopes.
      line: source line in the user's code: "model.py:12 (function)".
      backward: whether it is part of a backward pass.
      lhs, rhs, result: dtypes.
      batch, m, n, k: sizes, as `batch` products of (m, k) and (k, n). For convolutions n is the number of
        output channels, and k how many inputs each output is computed from.
      times: how often it runs: the length of the scans around it. A `while` counts as one trip.
      flops: floating-point operations of all its runs; a multiply-add counts as two.
      share: its share of the whole function's `flops`.
      pad: what to pad for rows of a multiple of 16 bytes ("n 1001 to 1008"), "" if nothing; a size of 1,
        which padding does not help, is "m 1".
      cause: places where half values met float32, or were cast to it, if it is not computed in half for that;
        "autocast" in a program that has it, "optax" if it is an optimizer's; else "".
      scales: how operands are scaled, of a product in float8: the name of the recipe; else "".
      stays: why it is not in float8, in a program that has such products; else "".
      precision: the `precision=` that it asks for itself, which keeps it in float32 under autocast; else "".
    """

    lhs: str
    rhs: str
    result: str
    batch: int
    m: int
    n: int
    k: int
    times: int
    flops: int
    share: float
    pad: str
    cause: str = ""
    scales: str = ""
    stays: str = ""
    precision: str = ""

    @property
    def is_half(self) -> bool:
        """Whether both operands have 16 bits or fewer, as products on Tensor Cores do."""
        return all(_is_narrow(name) for name in (self.lhs, self.rhs))

    @property
    def is_aligned(self) -> bool:
        """Whether rows of all matrices are multiples of 16 bytes."""
        return not self.pad


def of_few_terms(products: Sequence[Product]) -> set[Product]:
    """Those that gain nothing from half precision: that sum few terms, and for gradients of such."""
    narrow = {p.place for p in products if p.k < LEAST_TERMS and not p.backward}
    return {p for p in products if p.k < LEAST_TERMS or (p.backward and p.place in narrow)}


@dataclasses.dataclass(frozen=True)
class Upcast(Placed):
    """Half value that JAX promoted to float32 (or float64) silently, because it met such a value.

    Args:
      path, line: its place in the model and in the source.
      narrow, wide: dtypes before and after.
      shape: shape of the array.
      reaches: places of products that are computed in the larger dtype because of it.
    """

    path: str
    line: str
    narrow: str
    wide: str
    shape: tuple[int, ...]
    reaches: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class HalfOperation(PlacedOperation):
    """Operation in half precision that belongs in float32: an exponential, a logarithm, a sum.

    Which operations do is listed in NVIDIA's mixed-precision training guide.

    Args:
      operation: name of the primitive.
      path, line, backward: its place, as of a `Product`.
      dtype: dtype of the computation.
      times: how often it runs.
      why: what goes wrong in half precision, and of sums that add one term after another the repair.
      terms: of a sum, how many terms may go into one element; 0 for others, and where it is unknown.
    """

    dtype: str
    times: int
    why: str
    terms: int = 0


@dataclasses.dataclass(frozen=True)
class Audit(Report):
    """Result of `audit`; `str` is a table of the products and a verdict.

    Args:
      function: name of the function.
      products: every product, in order.
      upcasts: half values that JAX promoted silently.
      half_operations: operations in half precision that should be in float32.
      opaque: kernels that the audit cannot look into, with their number by name.
      flops: floating-point operations of all products.
      uncounted: whether there are products in a `while`, which is counted as one trip.
      constants: constants that half precision makes infinite or zero.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import audit
      >>> found = audit(jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8)))
      >>> [product.result for product in found.products], found.flops
      (['float32'], 1024)
    """

    function: str
    products: tuple[Product, ...]
    upcasts: tuple[Upcast, ...]
    half_operations: tuple[HalfOperation, ...]
    opaque: dict[str, int]
    flops: int
    uncounted: bool
    constants: tuple[lost_constants.LostConstant, ...] = ()

    _rows = "products"
    _computed = ("verdict", "half_share", "tensor_core_share")

    @property
    def half_share(self) -> float:
        """The share of `flops` in products of half operands; nan without products."""
        return sum(p.flops for p in self.products if p.is_half) / self.flops if self.flops else float("nan")

    @property
    def tensor_core_share(self) -> float:
        """The share of `flops` in products of aligned half operands; nan without products."""
        reached = sum(p.flops for p in self.products if p.is_half and p.is_aligned)
        return reached / self.flops if self.flops else float("nan")

    @property
    def wide_products(self) -> tuple[Product, ...]:
        """The products with an operand of more than 16 bits."""
        return tuple(p for p in self.products if not p.is_half)

    @property
    def verdict(self) -> str:
        """One line: which share of the FLOPs reaches Tensor Cores, and which products do not."""
        if self.products:
            parts = [*self._share_texts(), *self._wide_texts()]
            if silent := [u.place for u in self.upcasts if not u.reaches]:
                parts.append(f"{len(silent)} silent upcast{'s' * (len(silent) > 1)}: {joined_places(silent)}")
        else:
            parts = [f"{self.function} has no matrix products or convolutions"]
            if self.half_operations:
                parts.append(f"{len(self.half_operations)} operations in half precision to look at")
        harmful = dict[str, list[str]]()
        for h in filter(_is_harmful, self.half_operations):
            harmful.setdefault(f"{h.operation} in {h.dtype} {h.why}", []).append(h.place)
        sums = [f"{what} ({joined_places(places)})" for what, places in harmful.items()]
        if sums:
            parts.append(joined(sums))
        if self.constants:
            parts.append(lost_constants.text(self.constants))
        return "; ".join(parts) + "."

    def _share_texts(self) -> list[str]:
        total = self.flops or 1  # Empty arrays have none.
        halves = Counter[str]()
        others = dict[str, list[Product]]()
        for p in filter(lambda p: p.is_half, self.products):
            if p.is_aligned:
                halves[_widest(p)] += p.flops
            else:
                others.setdefault(_VECTORS if _ONE.search(p.pad) else "on shapes to pad", []).append(p)
        texts = [f"{percent(flops / total)} of FLOPs in {name}" for name, flops in halves.items()]
        parts = [f"{' and '.join(texts)} on Tensor-Core shapes"] if texts else []
        for shapes, products in others.items():
            share = percent(sum(p.flops for p in products) / total)
            largest = max(products, key=lambda p: p.flops)
            of = " of FLOPs" * (not parts)
            parts.append(f"{share}{of} in half precision {shapes}: {largest.place}, {largest.pad}")
        return parts or ["No product in half precision"]

    def _wide_texts(self) -> list[str]:
        """Describes the products that are not in half precision, and why."""
        causes = dict[str, str]()
        for p in self.wide_products:
            causes[p.place] = causes.get(p.place) or p.cause
        kinds = dict[tuple[str, str], list[Product]]()
        gain_nothing = of_few_terms(self.wide_products)
        for p in self.wide_products:
            few = p in gain_nothing
            terms = f" of fewer than {LEAST_TERMS} terms, where half precision gains nothing"
            kind = "" if not few else terms if p.k < LEAST_TERMS else " for gradients of such products"
            # Equal layers have one cause.
            why = "" if few else without_numbers(self._why_wide([causes[p.place]], [p]))
            kinds.setdefault((f"in {_widest(p)}{kind}", why), []).append(p)
        texts = list[str]()
        for (kind, why), found in kinds.items():
            places = joined_places(p.place for p in found)
            because = self._why_wide([causes[p.place] for p in found], found) if why else ""
            texts.append(f"{len(found)} product{'s' * (len(found) > 1)} {kind}: {places}{because}")
        return texts

    def _why_wide(self, causes: Sequence[str], products: Sequence[Product]) -> str:
        """Why products are not in half precision, which have their cause in common."""
        p, places = products[0], dict.fromkeys(place for c in causes for place in c.split("; ") if place)
        if jnp.issubdtype(_widest(p), jnp.complexfloating):
            return ", and no complex dtype is half"
        if places.keys() == {AUTOCAST} and p.precision:
            return (
                f", since autocast leaves what asks for precision={p.precision}, as JAX's linear algebra "
                "does: where you ask for it, leave that out, or wrap the module"
            )
        if places.keys() == {OPTAX}:
            return ", in optax, which computes in float32"
        if places.keys() == {AUTOCAST} and _widest(p) == "float64":
            return ", as an operand is float64, which autocast leaves: cast it to float32"
        if places.keys() == {AUTOCAST}:
            return (
                ", which autocast leaves: in region('off'), by rules=, full= or ops=, in a custom_vjp "
                "(its warning says what lowers it), in one of JAX's solvers, or outside of what is autocast"
            )
        if not places and any(other.is_half for other in self.products):
            return (
                ", whose operands were never half: by a rule, in a norm (a float32 island), in a module "
                "without parameters, as arrays that are no parameters, or outside of what is wrapped"
            )
        if not places:
            return (
                ", whose operands were never half: wrap the module, or autocast the function (and those that "
                "the passes of a custom_vjp call)"
            )
        narrow = {place: {u.narrow for u in self.upcasts if u.place == place} for place in places}
        if any(narrow.values()):
            where = joined_places(places)
            if all(len(types) > 1 for types in narrow.values()):
                return f", as bfloat16 met float16 in {where}: cast to one of them there"
            repair = "cast to half there (NumPy numbers, as np.sqrt(2), by float)"
            return f", as half values met {_widest(p)} in {where}: {repair}"
        is_there = places.keys() == {p.place for p in products}
        return f", cast to {_widest(p)} {'there' if is_there else f'in {joined_places(places)}'}"

    def _tables(self) -> Sequence[Table]:
        operations = {p.operation for p in self.products}
        (one,) = operations if len(operations) == 1 else ("",)
        is_float8 = any(p.scales for p in self.products)
        columns = (
            *("operation",) * (not one),
            *("module", "line", "pass", "dtypes", "size", "share ", "pad"),
            *("scales, or why not float8",) * is_float8,
        )
        rows = [
            (
                *(p.operation,) * (not one),
                *(_module(p.path), p.line.partition(" ")[0], p.direction),
                *(_dtypes(p), _size(p), Sum(p.share, percent), p.pad, *(p.scales or p.stays,) * is_float8),
            )
            for p in self.products
        ]
        title = f"Products of {self.function}{f', all {one}' * bool(one)}; size: batch x m x n x k"
        upcasts = [
            (u.path, u.line, f"{u.narrow} to {u.wide}", list(u.shape), joined(u.reaches) or "no product")
            for u in self.upcasts
        ]
        half = [
            (h.operation, h.dtype, h.path, h.line.partition(" ")[0], h.direction, Sum(h.times), h.terms or "")
            # Those that the verdict names first.
            for h in sorted(self.half_operations, key=_is_harmful, reverse=True)
        ]
        others = (
            Table(("module", "line", "cast", "shape", "reaches"), upcasts, "Silent upcasts", most=4),
            Table(_HALF_COLUMNS, half, "Still in half precision", most=1),
            lost_constants.table(self.constants),
        )
        others = [table for table in others if table.rows]
        # Where more is found, there is room for fewer of them.
        return [Table(columns, rows, title, most=20 - 3 * len(others)), *others]

    def _lines(self) -> Sequence[str]:
        lines = [f"{count_text(self.flops, 'FLOP')} in {len(self.products)} products."] if self.flops else []
        reasons = dict.fromkeys((h.operation, h.why) for h in self.half_operations if not _is_harmful(h))
        lines += [f"{operation} in half precision: {why}." for operation, why in reasons]
        if not all(u.reaches for u in self.upcasts):
            lines.append(
                "A silent upcast ends where what half values meet is half too, or a Python number: "
                "`.astype(x.dtype)`, for noise `jax.random.normal(key, x.shape).astype(x.dtype)`."
            )
        if self.uncounted:
            lines.append("Products in a while loop are counted once: nobody knows how often it runs.")
        if self.opaque:
            kernels = ", ".join(f"{name} ({count})" for name, count in self.opaque.items())
            lines.append(f"Not looked into: {kernels}.")
        if self.constants:
            lines.append(lost_constants.repair(self.constants))
        return [" ".join(lines), self.verdict] if lines else [self.verdict]


def _is_narrow(name: str) -> bool:
    dtype = jnp.dtype(name)
    return is_half(dtype) or name in ("int8", "uint8", "int4", "uint4")


_HALF_COLUMNS = ("operation", "dtype", "module", "line", "pass", "times ", "terms ")

#: Sums that add one term after another.
_SERIAL = HAVING[Trait.SCATTER_SUM] | {"scan", "while"}


def _is_harmful(found: HalfOperation) -> bool:
    """Whether what is in half precision loses more than one rounding, so that the verdict names it."""
    others = ("convert_element_type", "jax.random", "optax.apply_updates")
    return found.operation in _SERIAL or found.operation in others


def _widest(product: Product) -> str:
    def width(name: str) -> tuple[bool, int]:
        return jnp.issubdtype(name, jnp.inexact), jnp.dtype(name).itemsize

    return max(product.lhs, product.rhs, key=width)


def _module(path: str) -> str:
    """A path without the equation that `jnp.einsum` adds to it."""
    module, _, last = path.rpartition("/")
    return module if "->" in last else path


def _dtypes(p: Product) -> str:
    given = p.lhs if p.lhs == p.rhs else f"{p.lhs} x {p.rhs}"
    return given if given == p.result else f"{given} -> {p.result}"


def _size(product: Product) -> str:
    sizes = [product.m, product.n, product.k]
    times = f", {product.times} times" if product.times > 1 else ""
    return "x".join(map(str, [product.batch, *sizes] if product.batch > 1 else sizes)) + times
