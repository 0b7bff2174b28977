"""The same loop, branch, checkpoint or map as an equation of a jaxpr, around other functions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jmp_policy._src.jaxpr import compat

#: Of flat arrays, to flat arrays.
Function = Callable[..., Sequence[Any]]


def scan(eqn: Any, body: Function, arrays: Sequence[Any]) -> list[Any]:
    """Runs a scan. `body` takes constants, carries and one slice of each input; gives carries and outputs."""
    params = eqn.params
    consts, carries = compat.scan_sizes(params)

    def step(carry: Any, xs: Any) -> Any:
        outs = list(body(*arrays[:consts], *carry, *xs))
        return outs[:carries], outs[carries:]

    init, xs = list(arrays[consts : consts + carries]), list(arrays[consts + carries :])
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    final, ys = lax.scan(step, init, xs, **options)
    return [*final, *ys]


def cond(branches: Sequence[Function], arrays: Sequence[Any]) -> list[Any]:
    """Runs a cond or switch: `arrays` begin with the index."""
    return list(lax.switch(arrays[0], branches, *arrays[1:]))


def checkpoint(eqn: Any, function: Function, arrays: Sequence[Any], bind: Callable[..., Any]) -> list[Any]:
    """Runs a jax.checkpoint; one of a backward pass that is in the program already stays one.

    A fresh checkpoint would not keep XLA from merging that with the forward pass.
    """
    if not eqn.params["differentiated"]:
        options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return list(jax.checkpoint(function, **options)(*arrays))
    closed = jax.make_jaxpr(function)(*arrays)
    arrays = [*compat.constants(closed), *arrays]
    return bind(eqn, *arrays, jaxpr=compat.convert_constvars_jaxpr(closed))


def shard_map(eqn: Any, function: Function, arrays: Sequence[Any], out_specs: Any = None) -> list[Any]:
    """Runs a function under a jax.shard_map like that of an equation.

    Args:
      eqn: the equation.
      function: what runs on each device.
      arrays: its arguments, of all devices.
      out_specs: where its results lie, if it has others than the equation.
    """
    params = eqn.params
    mapped = jax.shard_map(
        lambda *arrays: tuple(function(*arrays)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]) if out_specs is None else out_specs,
        check_vma=params["check_vma"],
        axis_names=set(compat.manual_axes(params)),
    )
    return list(mapped(*arrays))
