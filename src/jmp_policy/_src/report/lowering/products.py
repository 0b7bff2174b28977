"""Finds matrix products and convolutions in the HLO of a program: size, precision, matrix units.

XLA's TPU compiler writes every product as a convolution: `dim_labels=bf_io->bf` is one of two matrices. A
batch of products is a convolution over a dilated axis, in which each position meets one element of the
kernel.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmp_policy._src.core.targets import Target
from jmp_policy._src.report.lowering import hlo
from jmp_policy._src.report.lowering.hlo import Instruction, Scope, arrays, inside

_DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "c64": "complex64",
    "c128": "complex128", "s8": "int8", "u8": "uint8", "s4": "int4", "s32": "int32", "pred": "bool",
}  # fmt: skip

#: Kinds of arithmetic of the products of recipes.
FEW_BITS = ("float8", "float4")

#: Kinds of arithmetic, slower ones first; those not listed are slower still.
_FASTER = ("complex128", "complex64", "float64", "float32", "bfloat16", "float16", "int8", "float8", "float4")

#: Columns of a TPU's registers, and of the matrix units of most.
_LANES = 128


#: The name that tracing gave a product, and the fields of a `Kernel` that describe it. A convolution is
#: described as the equivalent product.
Product = tuple[str, dict[str, Any]]


def few_bits(dtype: str) -> str:
    """The kind of arithmetic of a dtype that recipes round to, "float8" or "float4"; "" for another one."""
    return next((kind for kind in FEW_BITS if dtype.startswith(kind)), "")


def dtype_name(name: str) -> str:
    """The name that JAX has for a dtype of HLO text: "float16" for "f16"."""
    known = _DTYPES.get(name, name)
    return f"float{known[1]}_{known[2:]}" if known.startswith(("f8", "f4")) else known


def backend_config(instruction: Instruction) -> Mapping[str, Any]:
    """Parses the configuration that the compiler chose for an instruction; empty if there is none."""
    found = instruction.line.partition("backend_config=")[2]
    try:
        return json.JSONDecoder().raw_decode(found)[0] if found.startswith("{") else {}
    except ValueError:
        return {}


def fusion_kind(instruction: Instruction) -> str:
    """Who wrote a fusion: "__triton_gemm", "__cudnn$fusion"; "" for XLA itself and for no fusion."""
    return str(backend_config(instruction).get("fusion_backend_config", {}).get("kind", ""))


class Products:
    """Finds the products that the kernels of a module compute.

    Args:
      computations: those of the module.
      target: the device.
    """

    def __init__(self, computations: hlo.Computations, target: Target):
        self._computations, self._target = computations, target
        self._is_tpu = target.platform == "tpu"

    def of(self, instruction: Instruction, scope: Scope) -> list[Product]:
        """The products that a kernel computes; hardly ever more than one.

        Args:
          instruction: the kernel.
          scope: instructions of its computation by name.
        """
        library = instruction.attribute("custom_call_target")
        if "conv" in library and "cudnn" in library:
            return [self._convolution(instruction, scope)]
        if library == "__cudnn$blockScaledDot":
            # Operands with a scale per block: always rows with rows.
            shapes = _shapes(instruction, scope)
            *batch, _, k = range(len(shapes[0][1]))
            return [self._product(instruction, scope, _sizes(shapes, [k], batch))]
        if "matmul" in library or library.startswith("__cublas$"):
            return [self._library_product(instruction, scope)]
        if instruction.opcode == "convolution":
            (_, first), (_, second) = _shapes(instruction, scope)
            sizes = product_sizes(instruction, (first, second), arrays(instruction.shape)[0][1])
            return [self._product(instruction, scope, sizes, on_cores=self._is_tpu)]
        if instruction.opcode in ("dot", "scaled-dot"):
            return [self._dot(instruction, scope, on_cores=self._is_tpu)]
        if instruction.opcode != "fusion":
            return []
        # The other fusions compute a product element by element, on the ordinary units.
        libraries, kind = ("triton", "cudnn", "cutlass", "gemm"), fusion_kind(instruction)
        on_cores = self._is_tpu or any(word in kind for word in libraries)
        found, inner = [], inside(instruction, self._computations)
        for part in inner.values():
            if part.opcode in ("dot", "scaled-dot"):
                found.append(self._dot(part, inner, on_cores))
            elif part.opcode in ("fusion", "convolution"):
                found += self.of(part, inner)
        return found

    def _dot(self, dot: Instruction, scope: Scope, on_cores: bool) -> Product:
        names = "lhs_contracting_dims", "lhs_batch_dims"
        axes = ([int(d) for d in dot.attribute(name).split(",") if d.strip()] for name in names)
        return self._product(dot, scope, _sizes(_shapes(dot, scope), *axes), on_cores=on_cores)

    def _library_product(self, call: Instruction, scope: Scope) -> Product:
        config = backend_config(call).get("gemm_backend_config", {})
        numbers, precision = (config.get(name, {}) for name in ("dot_dimension_numbers", "precision_config"))
        names = "lhs_contracting_dimensions", "lhs_batch_dimensions"
        axes = (list(map(int, numbers.get(name, ()))) for name in names)
        return self._product(
            call,
            scope,
            _sizes(_shapes(call, scope), *axes),
            algorithm=precision.get("algorithm", "").lower(),
            # Triton takes TF32 where the precision is the default one, cuBLAS also where it is "high".
            precision="highest" if "HIGHEST" in precision.get("operand_precision", ()) else "",
        )

    def _convolution(self, call: Instruction, scope: Scope) -> Product:
        library = call.attribute("custom_call_target")
        (_, first), (_, second) = _shapes(call, scope)
        result = arrays(call.shape)[0][1]
        of_input, of_filter = "BackwardInput" in library, "BackwardFilter" in library
        kernel = result if of_filter else second
        output = first if of_input else second if of_filter else result
        labels = call.attribute("dim_labels").partition("_")[2].partition("-")[0]
        channels = kernel[labels.index("o")] if "o" in labels else 1
        # As the product of patches, one row per position, with the kernel, one column per channel.
        positions, patch = math.prod(output) // channels, math.prod(kernel) // channels
        m, n, k = (patch, channels, positions) if of_filter else (positions, channels, patch)
        sizes = (1, m, k, n) if of_input else (1, m, n, k)
        window = [size for size, label in zip(kernel, labels, strict=True) if label not in "oi"]
        return self._product(call, scope, sizes, rows=(channels, patch // math.prod(window)))

    def _product(
        self,
        instruction: Instruction,
        scope: Scope,
        sizes: tuple[int, int, int, int],
        algorithm: str = "",
        precision: str = "",
        on_cores: bool = True,
        rows: Sequence[int] = (),
    ) -> Product:
        target, (batch, m, n, k) = self._target, sizes
        algorithm = algorithm or instruction.attribute("algorithm").lower()
        precision = precision or instruction.attribute("operand_precision").lower()
        first, second = (dtype_name(dtype) for dtype, _ in _shapes(instruction, scope))
        if self._is_tpu:
            arithmetic = _tpu_arithmetic(first, second, precision, target)
            aligned = n % _LANES == k % _LANES == 0
        else:
            exact = any(word.strip() not in ("", "default") for word in precision.split(","))
            arithmetic = _arithmetic(first, second, algorithm, exact, target)
            with_scales = {"float8": "mxfp8"}.get(arithmetic, arithmetic)
            if instruction.opcode == "scaled-dot" and with_scales not in target.on_tensor_cores:
                arithmetic = "bfloat16"
            aligned = _is_aligned(first, rows or sizes[1:])
        shown = {
            "flops": 2 * batch * m * n * k,
            "operands": f"{first} x {second}",
            "result": dtype_name(arrays(instruction.shape)[0][0]),
            "accumulation": _accumulation(arithmetic, algorithm),
            "arithmetic": arithmetic,
            "tensor_cores": on_cores and arithmetic in target.on_tensor_cores,
            # Where the compiler splits the sum, k is smaller and the batch larger.
            "size": f"{m}x{n}x{k}" if batch == 1 else f"{batch}*{m}x{n}x{k}",
            "alignment": "aligned" if aligned else "unaligned",
        }
        return instruction.op_name, shown


def _shapes(instruction: Instruction, scope: Scope) -> list[tuple[str, tuple[int, ...]]]:
    return [arrays(scope[name].shape)[0] for name in instruction.operands[:2]]


def _sizes(
    shapes: Sequence[tuple[str, tuple[int, ...]]], contracted: Sequence[int], batched: Sequence[int]
) -> tuple[int, int, int, int]:
    """Batch, m, n and k of a product, for the axes of its first operand that are contracted and batched."""
    (_, first), (_, second) = shapes
    batch, k = (math.prod(first[d] for d in axes) for axes in (batched, contracted))
    m, n = (math.prod(shape) // max(batch * k, 1) for shape in (first, second))
    return batch, m, n, k


def _arithmetic(first: str, second: str, algorithm: str, exact: bool, target: Target) -> str:
    """The kind of arithmetic, which decides the rate: for mixed operands that of the slower one."""
    for word, arithmetic in (("tf32", "tf32"), ("bf16_bf16", "bfloat16"), ("f32_f32", "float32")):
        if word in algorithm:
            return arithmetic
    kinds = [few_bits(dtype) or dtype for dtype in (first, second)]
    slowest = min(kinds, key=lambda kind: _FASTER.index(kind) if kind in _FASTER else 0)
    if slowest == "float32" and not exact and "tf32" in target.on_tensor_cores:
        # JAX's default precision means TF32 on such cards.
        return "tf32"
    return slowest


def _tpu_arithmetic(first: str, second: str, precision: str, target: Target) -> str:
    """The kind of arithmetic of a TPU: passes over bfloat16 operands, as the precision asks."""
    kinds = {"float8" if dtype.startswith("float8") else dtype for dtype in (first, second)}
    if len(kinds) == 1 and (kind := next(iter(kinds))) in ("int8", "float8") and kind in target.rates:
        return kind
    if not all(kind.startswith(("float", "bfloat")) for kind in kinds) or "float64" in kinds:
        return min(kinds)
    if kinds <= {"bfloat16", "float8"}:
        return "bfloat16"
    return "float32" if "highest" in precision else "bfloat16_x3" if "high" in precision else "bfloat16"


def _accumulation(arithmetic: str, algorithm: str) -> str:
    if "f16_f16_f16" in algorithm and "bf16" not in algorithm:
        return "float16"
    if arithmetic in ("int8", "uint8", "int4", "int32"):
        return "int32"
    # XLA makes cuBLAS, cuDNN and Triton alike accumulate in float32 for operands of fewer bits.
    return arithmetic if arithmetic in ("float64", "complex64", "complex128") else "float32"


def _is_aligned(dtype: str, sizes: Sequence[int]) -> bool:
    bits = {"float16": 16, "bfloat16": 16, "float64": 64, "complex64": 64, "complex128": 128, "float4": 4}
    size = 8 if dtype.startswith(("float8", "int8", "uint8")) else bits.get(few_bits(dtype) or dtype, 32)
    return all(count * size % 128 == 0 for count in sizes)


_LABELS = re.compile(r"\bdim_labels=(\w+?)_(\w+)->(\w+)")


def product_sizes(
    convolution: Instruction, shapes: Sequence[tuple[int, ...]], result: Sequence[int]
) -> tuple[int, int, int, int]:
    """The sizes batch, m, n and k of the product that a convolution amounts to.

    Positions of the window that lie in padding or between elements of a dilated input are not counted.

    Args:
      convolution: an instruction `convolution`.
      shapes: those of its operands.
      result: shape of its result.
    """
    match = _LABELS.search(convolution.line)
    inputs, kernels, outputs = match.groups() if match else ("bf", "io", "bf")
    features = shapes[1][kernels.index("i")]
    batch = positions = met = 1
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", convolution.attribute("window")))
    for i in range(len(inputs) - 2):
        axis = {key: int(text.split("x")[i].partition("_")[0]) for key, text in window.items()}
        sizes = (shapes[0][inputs.index(str(i))], result[outputs.index(str(i))])
        pairs = _pairs(axis, *sizes)
        if pairs == axis.get("size", 1) == sizes[0] == sizes[1]:
            batch *= pairs
        else:
            positions *= sizes[1]
            met *= pairs
    m = result[outputs.index("b")] * positions
    return batch, m, result[outputs.index("f")], features * met // max(positions, 1) or 1


def _pairs(axis: Mapping[str, int], size: int, result: int) -> int:
    """How many elements of the input all positions of the window on one axis meet."""
    # Result o and position p meet at o * stride + p * rhs_dilate - pad: an element, if lhs_dilate divides it.
    results = np.arange(result) * axis.get("stride", 1)
    positions = np.arange(axis.get("size", 1)) * axis.get("rhs_dilate", 1)
    places, dilate = np.add.outer(results, positions) - axis.get("pad", 0), axis.get("lhs_dilate", 1)
    return int(np.sum((places >= 0) & (places <= (size - 1) * dilate) & (places % dilate == 0)))
