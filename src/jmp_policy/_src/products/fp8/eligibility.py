"""Says which products are computed in float8, which of a program are, and why the others are not.

Some gain nothing: time that a product saves is weighed against time to round its operands. The model is that
of the roofline: a product takes the time of its arithmetic or of its memory traffic, whichever is longer, and
rounding takes the time of its traffic and launches.
"""

from typing import Any, NamedTuple

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.targets import Target
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.matrix_products import Size, size_of
from jmp_policy._src.policy import recipes
from jmp_policy._src.products.fp8.ragged import MATRIX_PRODUCTS, ragged_stays_because
from jmp_policy._src.products.fp8.scales import BLOCKS, TERMS, has_blocks

#: Tensor Cores take float8 products whose sizes are multiples of the first, and with blocks of the second.
MULTIPLE, BLOCK_MULTIPLE = 16, TERMS

#: What has so many times as many outputs as inputs makes logits of a vocabulary, or looks it up backwards.
_VOCABULARY = 8


def recipe_of(eqn: Any) -> str:
    """Returns the recipe by which the operands of a product are rounded; "" where they are not.

    Those of a replay in float32 are not.
    """
    forward = recipes.passes_of(eqn.params.get("recipe", "")).fwd or ""
    is_rounded = forward and None not in eqn.params["formats"] and is_half(ir.dtype_of(eqn.invars[0]))
    return forward if is_rounded else ""


def formats_of(eqn: Any) -> tuple[str, str] | None:
    """Returns the float8 dtypes of the operands of a product; None for one of other dtypes."""
    return eqn.params["formats"] if recipe_of(eqn) else None


def stays_because(eqn: Any, recipe: str = "", is_asked_for: bool = False) -> str:
    """Returns why a half product is not computed in float8, or "".

    Args:
      eqn: a `dot_general` of a jaxpr.
      recipe: the one that it would have.
      is_asked_for: whether somebody asked for this very product, so that only the hardware's limits count.
    """
    size, dtype = size_of(eqn), max(map(ir.dtype_of, eqn.invars[:2]), key=lambda dtype: dtype.itemsize)
    if why := ragged_stays_because(eqn):
        return why
    if eqn.params["preferred_element_type"] not in (None, dtype):
        return f"its result is asked for in {eqn.params['preferred_element_type']}"
    if ir.asked_precision(eqn):
        return f"it asks for precision={eqn.params['precision']}"
    # A size that is known only when an exported program is called is that of a batch.
    sizes = {name: n for name in "mnk" if isinstance(n := getattr(size, name), int)}
    multiple = BLOCK_MULTIPLE if any(map(has_blocks, recipes.passes_of(recipe))) else MULTIPLE
    refused = [f"{name}={n}" for name, n in sizes.items() if n % multiple or not n]
    if refused:
        return f"{', '.join(refused)} is no multiple of {multiple}"
    n, k = sizes.get("n", 1), sizes.get("k", 1)
    if not is_asked_for and max(n, k) > _VOCABULARY * min(n, k):
        return "a vocabulary's size: " + (f"n={n} of k={k}" if n > k else f"k={k} to n={n}")
    return ""


def operand_dtypes(eqn: Any) -> tuple[str, ...]:
    """Returns the dtypes in which a product's two operands are multiplied."""
    return formats_of(eqn) or tuple(str(ir.dtype_of(atom)) for atom in eqn.invars[:2])


def why_not(eqn: Any, path: str) -> str:
    """Returns why a half product of a program with a recipe is not in float8, as far as the program tells.

    Args:
      eqn: a product of a jaxpr.
      path: names of the scopes around it.
    """
    if formats_of(eqn) or not all(is_half(ir.dtype_of(atom)) for atom in eqn.invars[:2]):
        return ""
    if eqn.primitive.name not in MATRIX_PRODUCTS:
        return f"recipes are for matrix products, not for {eqn.primitive.name}"
    if any(eqn.params.get("dimension_numbers", ((), ()))[1]):
        return "one of batches, as in attention"
    if "recipe" in eqn.params:
        return "" if None in eqn.params["formats"] else "the recipe is for gradients"
    return recipes.role_by_name(path, size_of(eqn).n) or stays_in_half(eqn) or "no recipe reaches it"


def stays_in_half(eqn: Any) -> str:
    """Returns why a product of a layer with a recipe is not in float8, by its size and settings; else ""."""
    if "recipe" in eqn.params:
        return ""
    marked = recipes.loses_by(compat.scopes(eqn))
    return stays_because(eqn) if marked is None else loses(Size(*marked[1]), marked[0])


class _Rounding(NamedTuple):
    """What a recipe adds to a layer's training step, as XLA compiles it.

    Args:
      activations: bytes of traffic for each element of the input and of the output's cotangent. Two bytes are
        read for the largest value and again for the cast, where no other kernel has them at hand.
      weights: bytes for each element of the weight and of its gradient.
      kernels: how many there are more.
    """

    activations: int
    weights: int
    kernels: int


#: As compiled for H100 at 1024 to 12288 features: a little more than all that was counted there
#: (`benchmarks/counts/float8.py`), so that what is chosen gains.
_PER_TENSOR = _Rounding(3, 4, 6)


#: The products of a tensor sum over different axes, along which it has other scales: it is rounded twice.
_PER_BLOCK = _Rounding(8, 15, 12)


#: With the transform, as compiled for a B200 with JAX 0.12.0: what it writes has 32 bits.
_TRANSFORMED = _Rounding(31, 15, 22)


def _rounding_of(recipe: str) -> _Rounding:
    if "rht" in (recipes.parts_of_nvfp4(recipe) or ()):
        return _TRANSFORMED
    return _PER_TENSOR if recipe in ("fp8_current", recipes.DELAYED) else _PER_BLOCK


class Profit(NamedTuple):
    """Estimated effect of a recipe on a product and the two of its gradient.

    Args:
      half: seconds of the three products in 16 bits.
      saved: seconds that they save in 8 bits.
      added: seconds that it takes to round the two operands and the cotangent.
    """

    half: float
    saved: float
    added: float

    @property
    def gains(self) -> bool:
        """Returns whether more is saved than added."""
        return self.saved > self.added

    def __str__(self) -> str:
        return f"{self.saved * 1e6:.3g} us saved, {self.added * 1e6:.3g} us added"


def profit_of(size: Size, recipe: str, target: Target) -> Profit:
    """Estimates what a recipe saves and adds in a training step.

    Args:
      size: of the product in the forward pass.
      recipe: of the two passes.
      target: the device.
    """
    batch, m, n, k, _ = size
    forward, gradients = [(m, n, k)], [(m, k, n), (k, n, m)]
    fwd, bwd = recipes.passes_of(recipe)
    parts = [(fwd, forward, m * k), (bwd, gradients, m * (k + n))]
    if fwd == bwd:  # What is rounded forward is so for the gradients.
        parts = [(fwd, forward + gradients, m * (k + n))]
    half = saved = added = 0.0
    for name, products, activations in parts:
        before = sum(_seconds(product, "bfloat16", target) for product in products)
        half += batch * before
        if name is not None:
            arithmetic = _arithmetic(name, target)
            saved += batch * (before - sum(_seconds(product, arithmetic, target) for product in products))
            rounding = _rounding_of(name)
            traffic = batch * (rounding.activations * activations + rounding.weights * k * n)
            added += traffic / target.bandwidth + rounding.kernels * target.launch_seconds
    return Profit(half, saved, added)


def _arithmetic(recipe: str, target: Target) -> str:
    """The arithmetic of a recipe's products on a device."""
    if recipe in BLOCKS:
        return "float8" if "mxfp8" in target.on_tensor_cores else "bfloat16"
    if recipes.parts_of_nvfp4(recipe) is not None:
        return "float4" if "float4" in target.on_tensor_cores else "bfloat16"
    return "float8"


_WIDTH = {"bfloat16": 2.0, "float8": 1.0, "float4": 0.5625}  # With a byte of scale for 16 numbers.


def _seconds(size: tuple[int, int, int], arithmetic: str, target: Target) -> float:
    (m, n, k), width = size, _WIDTH[arithmetic]
    return max(
        2 * m * n * k / target.rate(arithmetic), (width * (m * k + k * n) + 2 * m * n) / target.bandwidth
    )


def loses(size: Size, recipe: str) -> str:
    """Returns why a product stays in compute dtype under a recipe that is to gain on a device, or "".

    Args:
      size: of the product in the forward pass.
      recipe: "fp8_current@H100"; one without a device is followed everywhere.
    """
    target = recipes.target_of(recipe)
    if target is None:
        return ""
    if not all(isinstance(n, int) for n in size) or 0 in size:
        return f"its size, which is not known when it is traced, decides whether it gains on {target.name}"
    profit = profit_of(size, recipe, target)
    return "" if profit.gains else f"no gain on {target.name}: {profit}"
