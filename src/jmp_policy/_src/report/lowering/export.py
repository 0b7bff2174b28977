"""Exports a function as a program that another process, with another compiler, can compile."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jmp_policy._src.report.lowering.installed import unavailable

#: Names of custom calls in JAX's message: as StableHLO shows them.
_CUSTOM_CALL = re.compile(r"custom_call @\"?([^\s\"(]+)")
_MESH = re.compile(r"sdy\.mesh @\w+ = <\[((?:\"[^\"]+\"=\d+(?:, )?)+)\]")


class Exported(NamedTuple):
    """Program to compile.

    Args:
      data: the program as `jax.export` serialised it.
      devices: number of devices that it runs on.
      mesh: (name, size, type) of each axis of the mesh of its arguments.
      donated: positions of the arguments that it may overwrite.
    """

    data: bytes
    devices: int
    mesh: tuple[tuple[str, int, str], ...]
    donated: tuple[int, ...]


def exported(
    function: Callable[[Sequence[Any]], Any],
    arrays: Sequence[Any],
    donated: Sequence[int] = (),
    platform: str = "cuda",
) -> Exported:
    """Exports the program of a function of a list of arrays; needs no compiler, and runs nothing.

    Args:
      function: the function.
      arrays: its argument; `jax.ShapeDtypeStruct`s will do.
      donated: positions of the arrays that it may overwrite.
      platform: "cuda" for any GPU, "tpu" for any TPU.

    Raises:
      ValueError: when it calls back to the host, or its arguments are on several meshes.
    """
    types = [_type(array) for array in arrays]
    mesh = _mesh_of(types)

    def call(arrays: Sequence[Any]) -> list[Any]:
        # jax.export refuses trees with classes that it does not know, such as an optimizer's state.
        return jax.tree.leaves(function(arrays))

    program = _export(jax.jit(call), types, platform)
    try:
        data = bytes(program.serialize())
    except ImportError as error:
        raise unavailable(platform, ["flatbuffers"]) from error
    if program.nr_devices > 1 and not mesh:
        mesh = _mesh_in(program.mlir_module())
    return Exported(data, program.nr_devices, mesh, tuple(donated))


def _type(array: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(array, "sharding", None)
    kept = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=kept)


def _mesh_of(types: Sequence[jax.ShapeDtypeStruct]) -> tuple[tuple[str, int, str], ...]:
    meshes = {
        tuple(
            (str(name), size, kind.name)
            for name, size, kind in zip(m.axis_names, m.axis_sizes, m.axis_types, strict=True)
        )
        for m in (t.sharding.mesh for t in types if isinstance(t.sharding, NamedSharding))
    }
    if len(meshes) > 1:
        raise ValueError(f"The arguments lie on different meshes: {sorted(meshes)}. Give them one mesh.")
    return meshes.pop() if meshes else ()


def _mesh_in(text: str) -> tuple[tuple[str, int, str], ...]:
    match = _MESH.search(text)
    axes = re.findall(r'"([^"]+)"=(\d+)', match.group(1)) if match else []
    return tuple((name, int(size), "Auto") for name, size in axes)


def _export(jitted: Any, types: Sequence[jax.ShapeDtypeStruct], platform: str) -> Any:
    allowed: list[Any] = []
    try:
        return jax.export.export(jitted, platforms=[platform])(list(types))
    except ValueError as error:
        # Targets of custom calls that may change with the version of JAX; here both sides are of one version.
        if "custom calls" not in str(error):
            raise
        names = _CUSTOM_CALL.findall(str(error))
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in dict.fromkeys(names)]
    return jax.export.export(jitted, platforms=[platform], disabled_checks=allowed)(list(types))
