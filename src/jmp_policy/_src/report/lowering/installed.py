"""Tells whether JAX's compilers for GPUs and TPUs are installed, and what to install if they are not."""

import importlib.metadata
import re
from collections.abc import Sequence

import jax


class LoweringUnavailableError(RuntimeError):
    """Error for a compiler of JAX's that is not installed, or not in the version of JAX.

    Example:
      >>> issubclass(LoweringUnavailableError, RuntimeError)
      True
    """


def is_installed(platform: str = "cuda") -> bool:
    """Returns whether programs can be compiled here for a GPU ("cuda"), or for a TPU ("tpu")."""
    return not _missing(platform)


def check_installed(platform: str) -> None:
    """Raises `LoweringUnavailableError` unless the compiler for a platform is installed."""
    if missing := _missing(platform):
        raise unavailable(platform, missing)


def unavailable(platform: str, missing: Sequence[str]) -> LoweringUnavailableError:
    """Returns the error that says which packages are missing."""
    needed = _needed(platform)
    what, device, extra = {
        "cuda": (f"JAX's CUDA plugin of JAX's own version ({jax.__version__}) and ptxas", "GPU", "gpu"),
        "tpu": (f"libtpu in the version that JAX {jax.__version__} asks for", "TPU", "tpu"),
    }[platform]
    return LoweringUnavailableError(
        f"Compiling for a {device} needs {what}, though no {device}. Missing, or of another version: "
        f"{', '.join(missing)}. Run: pip install {' '.join(needed[name] for name in missing)}  "
        f"(all of them: pip install 'jmp_policy[{extra}-lowering]')."
    )


def _needed(platform: str) -> dict[str, str]:
    version = jax.__version__
    compilers = {
        "cuda": {
            "jax-cuda12-plugin": f"jax-cuda12-plugin=={version}",
            "jax-cuda12-pjrt": f"jax-cuda12-pjrt=={version}",
            "nvidia-cuda-nvcc-cu12": "nvidia-cuda-nvcc-cu12",
        },
        "tpu": {"libtpu": _libtpu()},
    }
    return compilers[platform] | {"flatbuffers": "flatbuffers"}


def _libtpu() -> str:
    """Returns the requirement that JAX's own extra for TPUs has: "libtpu==0.0.42.*"."""
    try:
        asked = importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        asked = []
    found = next((line for line in asked if re.match(r"libtpu\b", line)), "libtpu")
    return found.partition(";")[0].replace(" ", "")


def _missing(platform: str) -> list[str]:
    missing = []
    for name, requirement in _needed(platform).items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if not version or not _fits(version, requirement.removeprefix(name)):
            missing.append(name)
    return missing


def _fits(version: str, asked: str) -> bool:
    """Returns whether a version is "==1.2.3", or one of "==1.2.*"; whether no version is asked for."""
    wanted = asked.removeprefix("==")
    if wanted.endswith(".*"):
        return version.startswith(wanted[:-1])
    return wanted in ("", version)
