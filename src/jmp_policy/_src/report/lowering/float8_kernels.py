"""Checks that products which a program has in float8 are compiled to float8 kernels."""

from collections.abc import Sequence
from typing import Any

from jmp_policy._src.core.report_base import joined
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.jaxpr.op_table import Trait, having
from jmp_policy._src.jaxpr.walk import Site, ValueInfo, walk
from jmp_policy._src.products.fp8.eligibility import operand_dtypes, recipe_of
from jmp_policy._src.report.lowering.kernels import Kernel


class _Paths:
    """Visitor of a jaxpr that collects the paths of float8 products, with their recipe, and of all others."""

    def __init__(self) -> None:
        self.float8: dict[str, str] = {}
        self.others: dict[str, None] = {}

    def marks(self, eqn: Any, site: Site, operands: Sequence[ValueInfo]) -> frozenset[int]:
        return frozenset()

    def loop(self, eqn: Any, site: Site) -> None:
        """Does nothing: products in loops are seen in them."""

    def see(self, eqn: Any, site: Site, operands: Sequence[ValueInfo], results: Sequence[ValueInfo]) -> None:
        if eqn.primitive.name in _PRODUCTS and ir.dtype_of(eqn.outvars[0]) is not None:
            if all(dtype.startswith("float8") for dtype in operand_dtypes(eqn)):
                self.float8.setdefault(site.path, recipe_of(eqn))
            else:
                self.others[site.path] = None


_PRODUCTS = having(Trait.PRODUCT)


def recipes_by_path(jaxpr: Any) -> dict[str, str]:
    """Returns the recipe of the float8 products of each module that has such products by a recipe."""
    paths = _Paths()
    walk(jaxpr, paths)
    return {path: recipe for path, recipe in paths.float8.items() if recipe}


def float8_halves(jaxpr: Any) -> set[str]:
    """Returns the dtypes that operands of float8 products by recipes had before they were rounded."""
    return {str(ir.dtype_of(eqn.invars[0])) for eqn in ir.equations(jaxpr) if recipe_of(eqn)}


def check_float8(jaxpr: Any, kernels: Sequence[Kernel], program: str) -> None:
    """Raises AssertionError where a product that is to be in float8 has a kernel of other operands.

    Kernels are told by the scopes they come from. Where a scope has products of both kinds they cannot be
    told apart, and one float8 kernel there is enough.

    Args:
      jaxpr: the program as it was traced.
      kernels: as it was compiled.
      program: what it is, for the message.
    """
    paths = _Paths()
    walk(jaxpr, paths)
    if not paths.float8:
        raise AssertionError(
            f"{program} has no float8 product, though require='float8' was given. Give its policy a recipe "
            "('mixed_bfloat16, r=fp8_current'); jmp_policy.audit says why products stay in 16 bits."
        )
    products = [kernel for kernel in kernels if kernel.flops]
    in_float8 = {kernel.path for kernel in products if _is_float8(kernel)}
    fell_back = [
        kernel
        for kernel in products
        if kernel.path in paths.float8 and not _is_float8(kernel)
        if kernel.path not in paths.others or kernel.path not in in_float8
    ]
    if fell_back or not in_float8:
        found = dict.fromkeys(f"{kernel.place}: {kernel.operands}" for kernel in fell_back or products)
        raise AssertionError(
            f"The compiler gave up float8 in {program}: {joined(list(found))}. Cards from compute capability "
            "8.9 on (L4, H100, B200) multiply float8. With a scale per block one B200 alone does."
        )


def _is_float8(kernel: Kernel) -> bool:
    return kernel.arithmetic == "float8"
