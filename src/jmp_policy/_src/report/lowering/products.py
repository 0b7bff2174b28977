"""Finds matrix products and convolutions in the HLO of a program: size, precision, matrix units."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jmp_policy._src.core.targets import Target
from jmp_policy._src.report.lowering.convolutions import product_sizes
from jmp_policy._src.report.lowering.hlo import Computations, Instruction, arrays

_DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "c64": "complex64",
    "c128": "complex128", "s8": "int8", "u8": "uint8", "s4": "int4", "s32": "int32", "pred": "bool",
}  # fmt: skip

#: Kinds of arithmetic, slower ones first; those not listed are slower still.
_FASTER = ("complex128", "complex64", "float64", "float32", "bfloat16", "float16", "int8", "float8")

#: Columns of a TPU's registers, and of the matrix units of most.
_LANES = 128

#: Instructions that a value may pass through between a pad and the product that it was padded for.
_FORWARDING = frozenset(["bitcast", "copy", "convert", "transpose", "reshape"])


@dataclasses.dataclass(frozen=True)
class Product:
    """Product of matrices, or of a batch of them; a convolution is described as the equivalent product.

    Args:
      operands: dtypes of both operands.
      result, accumulation: dtypes of the result and of the sums.
      arithmetic: kind of arithmetic, which decides the rate: "float16", "tf32", "float32", ...
      tensor_cores: whether Tensor Cores do it.
      batch, m, n, k: sizes; split-K makes k smaller and the batch larger.
      alignment: "aligned" when m, n and k are multiples of 16 bytes; "padded" when the compiler made them so;
        or "unaligned".
      op_name: name that tracing gave it.
    """

    operands: tuple[str, str]
    result: str
    accumulation: str
    arithmetic: str
    tensor_cores: bool
    batch: int
    m: int
    n: int
    k: int
    alignment: str
    op_name: str

    @property
    def flops(self) -> int:
        """Returns the number of multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k


def dtype_name(hlo: str) -> str:
    """Returns JAX's name of a dtype in HLO text: "float16" for "f16"."""
    return _DTYPES.get(hlo, hlo.replace("f8", "float8_", 1) if hlo.startswith("f8") else hlo)


def backend_config(instruction: Instruction) -> Mapping[str, Any]:
    """Parses the configuration that the compiler chose for an instruction; empty if there is none."""
    _, found, rest = instruction.line.partition("backend_config={")
    if not found:
        return {}
    try:
        return json.JSONDecoder().raw_decode("{" + rest)[0]
    except ValueError:
        return {}


def products_of(
    instruction: Instruction, computations: Computations, scope: Mapping[str, Instruction], target: Target
) -> list[Product]:
    """Returns the products that a kernel computes; hardly ever more than one.

    Args:
      instruction: the kernel.
      computations: computations of the module.
      scope: instructions of the kernel's computation by name.
      target: the device.
    """
    library = instruction.attribute("custom_call_target")
    if "conv" in library and "cudnn" in library:
        return [_convolution(instruction, scope, target)]
    if library == "__cudnn$blockScaledDot":
        return [_block_scaled_product(instruction, scope, target)]
    if "matmul" in library or library.startswith("__cublas$"):
        return [_library_product(instruction, computations, scope, target)]
    if instruction.opcode == "convolution":
        return [_window_product(instruction, scope, target)]
    if instruction.opcode in ("dot", "scaled-dot"):
        return [_dot(instruction, computations, scope, None, target, on_cores=target.platform == "tpu")]
    if instruction.opcode != "fusion":
        return []
    kind = str(backend_config(instruction).get("fusion_backend_config", {}).get("kind", ""))
    # The other fusions compute a product element by element, on the ordinary units.
    on_cores = target.platform == "tpu" or any(w in kind for w in ("triton", "cudnn", "cutlass", "gemm"))
    found = []
    for name in instruction.called:
        inner = {i.name: i for i in computations.get(name, ())}
        for part in inner.values():
            outside = (instruction, scope)
            if part.opcode in ("dot", "scaled-dot"):
                found.append(_dot(part, computations, inner, outside, target, on_cores))
            elif part.opcode in ("fusion", "convolution"):
                found += products_of(part, computations, inner, target)
    return found


def _dot(
    dot: Instruction,
    computations: Computations,
    scope: Mapping[str, Instruction],
    outside: tuple[Instruction, Mapping[str, Instruction]] | None,
    target: Target,
    on_cores: bool,
) -> Product:
    axes = {
        name: [int(d) for d in dot.attribute(name).split(",") if d.strip()]
        for name in ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims")
    }
    sizes = _sizes(_shapes(dot, scope), *axes.values())
    precision = dot.attribute("operand_precision").lower()
    padded = any(_was_padded(name, computations, scope, outside) for name in dot.operands[:2])
    return _product(dot, scope, sizes, dot.attribute("algorithm"), precision, padded, target, on_cores)


def _library_product(
    call: Instruction, computations: Computations, scope: Mapping[str, Instruction], target: Target
) -> Product:
    config = backend_config(call).get("gemm_backend_config", {})
    numbers = config.get("dot_dimension_numbers", {})
    axes = [
        [int(d) for d in numbers.get(f"{side}_{kind}_dimensions", ())]
        for kind in ("contracting", "batch")
        for side in ("lhs", "rhs")
    ]
    precision = config.get("precision_config", {})
    padded = any(_was_padded(name, computations, scope, None) for name in call.operands[:2])
    # Triton takes TF32 where the precision is the default one, cuBLAS also where it is "high".
    exact = "highest" if "HIGHEST" in precision.get("operand_precision", ()) else ""
    sizes = _sizes(_shapes(call, scope), *axes)
    return _product(call, scope, sizes, precision.get("algorithm", ""), exact, padded, target, True)


def _block_scaled_product(call: Instruction, scope: Mapping[str, Instruction], target: Target) -> Product:
    """Returns a product of operands with a scale per block, which is always of rows with rows."""
    shapes = _shapes(call, scope)
    *batch, _, k = range(len(shapes[0][1]))
    return _product(call, scope, _sizes(shapes, [k], [k], batch, batch), "", "", False, target, True)


def _convolution(call: Instruction, scope: Mapping[str, Instruction], target: Target) -> Product:
    library = call.attribute("custom_call_target")
    (_, first), (_, second) = _shapes(call, scope)
    result = arrays(call.shape)[0][1]
    kernel, output = second, result
    if "BackwardInput" in library:
        output = first
    elif "BackwardFilter" in library:
        kernel, output = result, second
    labels = call.attribute("dim_labels").partition("_")[2].partition("-")[0]
    channels = kernel[labels.index("o")] if "o" in labels else 1
    # As the product of patches, one row per position, with the kernel, one column per channel.
    positions, patch = math.prod(output) // channels, math.prod(kernel) // channels
    m, n, k = positions, channels, patch
    if "BackwardInput" in library:
        m, n, k = positions, patch, channels
    elif "BackwardFilter" in library:
        m, n, k = patch, channels, positions
    made = _product(call, scope, (1, m, n, k), "", "", False, target, True)
    inputs = (
        math.prod(kernel)
        // channels
        // math.prod(size for size, label in zip(kernel, labels, strict=True) if label not in "oi")
    )
    aligned = _is_aligned(made.operands[0], (channels, inputs))
    return dataclasses.replace(made, alignment="aligned" if aligned else "unaligned")


def _window_product(convolution: Instruction, scope: Mapping[str, Instruction], target: Target) -> Product:
    (_, first), (_, second) = _shapes(convolution, scope)
    sizes = product_sizes(convolution, (first, second), arrays(convolution.shape)[0][1])
    precision = convolution.attribute("operand_precision").lower()
    on_cores = target.platform == "tpu"
    return _product(convolution, scope, sizes, "", precision, False, target, on_cores)


def _product(
    instruction: Instruction,
    scope: Mapping[str, Instruction],
    sizes: tuple[int, int, int, int],
    algorithm: str,
    precision: str,
    padded: bool,
    target: Target,
    on_cores: bool,
) -> Product:
    first, second = (dtype_name(dtype) for dtype, _ in _shapes(instruction, scope))
    if target.platform == "tpu":
        arithmetic = _tpu_arithmetic(first, second, precision, target)
        aligned = all(size % _LANES == 0 for size in sizes[2:])
    else:
        exact = any(word.strip() not in ("", "default") for word in precision.split(","))
        arithmetic = _arithmetic(first, second, algorithm.lower(), exact, target)
        if instruction.opcode == "scaled-dot" and "mxfp8" not in target.on_tensor_cores:
            arithmetic = "bfloat16"
        aligned = _is_aligned(first, sizes[1:])
    return Product(
        operands=(first, second),
        result=dtype_name(arrays(instruction.shape)[0][0]),
        accumulation=_accumulation(arithmetic, algorithm.lower()),
        arithmetic=arithmetic,
        tensor_cores=on_cores and arithmetic in target.on_tensor_cores,
        batch=sizes[0], m=sizes[1], n=sizes[2], k=sizes[3],
        alignment="padded" if padded else "aligned" if aligned else "unaligned",
        op_name=instruction.op_name,
    )  # fmt: skip


def _shapes(instruction: Instruction, scope: Mapping[str, Instruction]) -> list[tuple[str, tuple[int, ...]]]:
    return [arrays(scope[name].shape)[0] for name in instruction.operands[:2]]


def _sizes(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    contracted: Sequence[int],
    other_contracted: Sequence[int],
    batched: Sequence[int],
    other_batched: Sequence[int],
) -> tuple[int, int, int, int]:
    (_, first), (_, second) = shapes
    batch = math.prod(first[d] for d in batched)
    k = math.prod(first[d] for d in contracted)
    m = math.prod(size for d, size in enumerate(first) if d not in (*contracted, *batched))
    n = math.prod(size for d, size in enumerate(second) if d not in (*other_contracted, *other_batched))
    return batch, m, n, k


def _arithmetic(first: str, second: str, algorithm: str, exact: bool, target: Target) -> str:
    """Returns the kind of arithmetic, which decides the rate: for mixed operands that of the slower one."""
    for word in ("tf32", "bf16_bf16", "f32_f32"):
        if word in algorithm:
            return {"tf32": "tf32", "bf16_bf16": "bfloat16", "f32_f32": "float32"}[word]
    kinds = ["float8" if dtype.startswith("float8") else dtype for dtype in (first, second)]
    slowest = min(kinds, key=lambda kind: _FASTER.index(kind) if kind in _FASTER else 0)
    if slowest == "float32" and not exact and "tf32" in target.on_tensor_cores:
        # JAX's default precision means TF32 on such cards.
        return "tf32"
    return slowest


def _tpu_arithmetic(first: str, second: str, precision: str, target: Target) -> str:
    """Returns the kind of arithmetic of a TPU: passes over bfloat16 operands, as the precision asks."""
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
    bits = {"float16": 16, "bfloat16": 16, "float64": 64, "complex64": 64, "complex128": 128}
    size = 8 if dtype.startswith(("float8", "int8", "uint8")) else bits.get(dtype, 32)
    return all(count * size % 128 == 0 for count in sizes)


def _was_padded(
    name: str,
    computations: Computations,
    scope: Mapping[str, Instruction],
    outside: tuple[Instruction, Mapping[str, Instruction]] | None,
) -> bool:
    """Returns whether the compiler padded a value: with a `pad` that is no operation of the program."""
    while name in scope:
        source = scope[name]
        if source.opcode == "pad":
            return not source.op_name.endswith("/pad")
        if source.opcode == "parameter" and outside is not None:
            fusion, scope = outside
            index = int(source.line.partition("parameter(")[2].partition(")")[0])
            name, outside = fusion.operands[index], None
        elif source.opcode == "fusion" and len(source.called) == 1:
            inner = computations.get(source.called[0], [])
            root = next((i for i in inner if i.is_root), None)
            return root is not None and root.opcode == "pad" and not root.op_name.endswith("/pad")
        elif source.opcode in _FORWARDING and source.operands:
            name = source.operands[0]
        else:
            return False
    return False
