"""Reads and shows dtypes as users do, refuses those without range, and names the half type of a device."""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.core.settings import shown
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.core.types import DTypeLike

#: Short and long words for dtypes, as users write them in a policy's text.
DTYPE_WORDS: dict[str, Any] = {
    **dict.fromkeys(("f16", "fp16", "float16"), jnp.float16),
    **dict.fromkeys(("bf16", "bfloat16"), jnp.bfloat16),
    **dict.fromkeys(("f32", "fp32", "float32", "full"), jnp.float32),
    **dict.fromkeys(("f64", "fp64", "float64"), jnp.float64),
}
#: By the names that JAX gives them: a cast of eight bits and fewer has no scale.
_NARROW = (
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
)  # fmt: skip
_KNOWN = {word: jnp.dtype(dtype) for word, dtype in (DTYPE_WORDS | {name: name for name in _NARROW}).items()}
_DTYPES = frozenset(_KNOWN.values())


def best_half_dtype(device: Any = None) -> np.dtype:
    """The 16-bit dtype that suits a device: bfloat16 where its matrix units support it, else float16.

    Args:
      device: the device; the first one of the default backend if None.

    Returns:
      `bfloat16` for TPUs, CPUs, AMD's and NVIDIA's GPUs from compute capability 8.0 (Ampere) on, and
      `float16` for older NVIDIA GPUs, whose Tensor Cores support no other 16-bit dtype.

    Raises:
      TypeError: for something that is no device.

    Example:
      >>> best_half_dtype(jax.local_devices(backend="cpu")[0])
      dtype(bfloat16)
    """
    device = jax.devices()[0] if device is None else device
    if not hasattr(device, "platform"):
        raise TypeError(f"best_half_dtype takes a device, such as jax.devices()[0]; got {device!r}.")
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if device.platform in ("gpu", "cuda") and capability and int(capability.group(1)) < 8:
        return np.dtype(jnp.float16)
    return np.dtype(jnp.bfloat16)


def parse_dtype(word: DTypeLike | None, where: str) -> np.dtype:
    """Parses a floating dtype from its name, a scalar type or a dtype.

    Args:
      word: "f16", "bfloat16", "half", jnp.float16, np.dtype("float16"), torch.float16, ... Texts are those
        of `DTYPE_WORDS` and JAX's names: to NumPy "f8" is float64, and "e" float16.
      where: what the word was given for, as the error message says it.

    Raises:
      ValueError: for a word that names no dtype, and for a dtype that is not floating.
    """
    if isinstance(word, np.dtype) and word in _DTYPES:  # The common case, and quick.
        return word
    if type(word).__module__ == "torch":
        word = str(word).removeprefix("torch.")
    if word is None:
        raise ValueError(f"The dtype {where} is None; it must be a floating dtype such as 'float16'.")
    if isinstance(word, str):
        name = word.strip().lower()
        if name == "half":
            return best_half_dtype()
        if name in _KNOWN:
            return _KNOWN[name]
    dtype = None
    with contextlib.suppress(TypeError, ValueError):
        # Of an array NumPy would take the dtype.
        dtype = jnp.dtype(word) if isinstance(word, str | type | np.dtype) else None
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"The dtype {where} is {dtype.name}, which is not floating: policies only ever cast "
            "floating values. Use float16, bfloat16, float32 or float64."
        )
    if dtype is None or dtype not in _DTYPES or isinstance(word, str):
        words, text = [*DTYPE_WORDS, "half"], shown(word)
        hint = float8_hint(text) or did_you_mean(text.strip("' ").lower(), words)
        raise ValueError(f"Unknown dtype {text} {where}.{hint} Known: {', '.join(words)}.")
    return dtype


def array_type_text(x: Any) -> str:
    """Formats dtype and shape of an array as messages show them: "float32[2,3]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


#: Why a policy has no float8 type, and what to do.
NO_SCALES = (
    "Eight bits hold so few numbers that every tensor needs a scale of its own, and a policy's casts have "
    "none: gradients would be wrong by tens of percent. Ask for bfloat16, and for products that have scales: "
    "the recipe of a policy ('mixed_bfloat16,recipe=fp8_current'), Flax's "
    "dot_general_cls=nn.Fp8DirectDotGeneralOp, or the library qwix."
)


def float8_hint(word: str) -> str:
    """Returns " Eight bits ..." for a word that may ask for a float8 type; else ""."""
    return f" {NO_SCALES}" if re.search(r"(f|fp|float)8|e4m3|e5m2", word.lower()) else ""


def check_has_range(dtype: np.dtype, asked: str) -> None:
    """Raises for dtypes of 8 bits and fewer, in which casts alone give nothing useful.

    Args:
      dtype: what values would be cast to.
      asked: who asks for it, as the message begins: "The policy 'c=float8_e4m3fn'".

    Raises:
      ValueError: for floating dtypes of fewer than 16 bits.
    """
    if is_floating(dtype) and jnp.finfo(dtype).bits < 16:
        largest = float(jnp.finfo(dtype).max)
        raise ValueError(f"{asked} asks for {dtype}, which holds nothing above {largest:g}. {NO_SCALES}")
