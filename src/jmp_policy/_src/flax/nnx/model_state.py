"""What a training step does to the state of NNX modules that is not trained: statistics, counts, caches.

On a skipped step it is kept as it was; with gradient accumulation it goes from micro-batch to micro-batch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp_policy._src.core.dtypes import in_dtype_of
from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.flax.nnx import graph_nodes, stored_arrays
from jmp_policy._src.flax.nnx.train import WATCHING, scaled_value_and_grad
from jmp_policy._src.loss_scaling.accumulate import make_window, run_window
from jmp_policy._src.loss_scaling.loss_scale import LossScale
from jmp_policy._src.loss_scaling.metrics import get_loss_scale_state, grads_finite
from jmp_policy._src.loss_scaling.selection import select_tree
from jmp_policy._src.loss_scaling.state import find_loss_scale

#: All that `nnx.Optimizer(..., wrt=nnx.Param)` does not keep on a skipped step itself.
_NOT_PARAMS = nnx.Not(nnx.Param)


@contextlib.contextmanager
def keep_state_on_skip(optimizer: Any, *modules: nnx.Module, only: Any = _NOT_PARAMS) -> Iterator[None]:
    """Leaves a module's other state (batch statistics, caches, random counts) as it was on a skipped step.

    A forward pass that overflows writes infinities into running statistics, which never leave them. Put the
    loss, its gradient and the update inside the block; usable in `nnx.jit`. What has another shape or dtype
    after the step, or more entries (as what is sown), is of its batch, and is not put back, unless it was one
    number or integers.

    Args:
      optimizer: an `nnx.Optimizer` whose transformation is `loss_scaled`, or its `opt_state`.
      modules: the modules whose Variables and arrays are kept; of an `nnx.ModelAndOptimizer`, its model's.
      only: which Variables, as an NNX filter; by default all but parameters, and those of these that the
        forward pass writes to (moving averages in an `nnx.Param`, weight normalisation) if the gradient is
        of `jmp_policy.nnx`, and in no `nnx.jit` of its own.

    Raises:
      ValueError: when no loss scale, or more than one, is found.
      TypeError: for something that is no module, and without any module.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import flax.nnx as nnx
      >>> from jmp_policy import DynamicLossScale, loss_scaled
      >>> model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
      >>> tx = loss_scaled(optax.sgd(0.1), DynamicLossScale())
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> def loss_fn(model, x):
      ...     return model(x).sum()
      >>> with keep_state_on_skip(optimizer, model):
      ...     loss, grads = scaled_value_and_grad(loss_fn)(optimizer, model, jnp.full((2, 1), jnp.inf))
      ...     _ = optimizer.update(model, grads)
      >>> float(model.mean[0])
      0.0
    """
    get_loss_scale_state(optimizer)  # Raises now, and not after the step.
    is_kept, models = nnx.filterlib.to_predicate(only), _models(modules)
    before = _held(models)
    kept = {place for place, (stored_in, _) in before.items() if is_kept(place[1], stored_in)}

    @contextlib.contextmanager
    def watch() -> Iterator[None]:
        start = _held(models)
        yield
        now = _held(models)
        changed = {place for place in start.keys() & now.keys() if now[place][1] is not start[place][1]}
        kept.update(before.keys() & changed)

    token = WATCHING.set((*WATCHING.get(), watch) if only is _NOT_PARAMS else WATCHING.get())
    try:
        yield
    finally:
        WATCHING.reset(token)
    finite, graph_of = grads_finite(optimizer), functools.cache(lambda i: dict(nnx.iter_graph(models[i])))
    for place, (stored_in, new) in _held(models).items():
        old = before[place][1] if place in kept else new
        if new is old or jax.tree.structure(new) != jax.tree.structure(old):
            continue
        selected = jax.tree.map(functools.partial(_selected, finite), old, new)
        if isinstance(stored_in, nnx.Variable):
            stored_arrays.write(stored_in, selected)
        else:
            _put(graph_of(place[0]), place[1], selected)


def _selected(finite: jax.Array, old: Any, new: Any) -> Any:
    """The new state; on a skipped step the old array or number, in the shape and dtype of the new one."""
    new = in_dtype_of(old, new)  # State that was computed in half stays what it was.
    if not isinstance(old, _NUMBERS) or not isinstance(new, jax.Array):
        return new
    before = old if isinstance(old, jax.Array) else np.asarray(old)
    if before.dtype != new.dtype:
        is_key = any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in (before, new))
        if is_key or (jnp.iscomplexobj(before) and not jnp.iscomplexobj(new)):
            return new
        before = before.astype(new.dtype)
    if before.shape != new.shape:
        if before.size != 1 or jnp.issubdtype(new.dtype, jax.dtypes.extended):
            return new
        before = jnp.full_like(new, before.reshape(()))  # A sum may begin as the number 0.
    return select_tree(finite, new, jnp.asarray(before))


_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float, complex)


def _held(models: Sequence[nnx.Module]) -> dict[tuple[int, graph_nodes.Path], tuple[Any, Any]]:
    """The Variables of models with what they store, and arrays beside them, by number of model and path.

    Not by identity: a forward pass may put another Variable in the place of one (`nnx.bridge.ToNNX` does).
    """
    return {
        (i, path): (value, stored_arrays.read(value) if isinstance(value, nnx.Variable) else value)
        for i, model in enumerate(models)
        for path, value in nnx.iter_graph(model)
        if isinstance(value, (nnx.Variable, *_NUMBERS))
    }


def _put(graph: dict[graph_nodes.Path, Any], path: graph_nodes.Path, value: Any) -> None:
    """Puts an array in the place of another one, in any pytree that an NNX object has for an attribute."""
    depth = max(n for n in range(len(path)) if isinstance(graph[path[:n]], nnx.Pytree))
    holder, name, inside = graph[path[:depth]], path[depth], path[depth + 1 :]
    if isinstance(holder, nnx.List | nnx.Dict):
        holder[name] = value
        return
    leaves, structure = jax.tree_util.tree_flatten_with_path(vars(holder)[name], graph_nodes.is_node)
    new = [value if tuple(map(graph_nodes.key_of, keys)) == inside else leaf for keys, leaf in leaves]
    vars(holder)[name] = structure.unflatten(new)


def _models(modules: Sequence[Any]) -> list[nnx.Module]:
    # The optimizer's own state must move on: a loss scale that is put back never recovers.
    models = [m.model if isinstance(m, nnx.ModelAndOptimizer) else m for m in modules]
    if not models or not all(isinstance(model, nnx.Module) for model in models):
        given = ", ".join(type(model).__name__ for model in models) or "none"
        raise TypeError(f"keep_state_on_skip(optimizer, model) keeps the state of modules, got {given}.")
    return models


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    n: int,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    allow_int: bool = False,
    loss: str | None = None,
    accumulator_dtype: DTypeLike = jnp.float32,
    axis_name: Any = None,
    mesh: Any = None,
) -> Callable[..., tuple[Any, PyTree]]:
    """Accumulates gradients of a loss function that takes an NNX module first.

    Args:
      loss_fn: the loss function `(model, *batch, **kwargs)`, returning a real scalar, or `(loss, aux)` with
        `has_aux`.
      n: micro-batches per window.
      wrt: which Variables to differentiate by, as an NNX filter; the same as the optimizer's.
      has_aux, allow_int, loss, accumulator_dtype, axis_name, mesh: as for
        `jmp_policy.accumulate_gradients`.

    Returns:
      A function `(scale_or_optimizer, model, *batch, **kwargs) -> (value, grads)`, to be used as that of
      `jmp_policy.nnx.scaled_value_and_grad`.

      The module's other state (batch statistics, random counts) goes from one micro-batch to the next, and
      is in the module afterwards; for a skipped window, use `keep_state_on_skip`. With `axis_name`, floating
      state is averaged over the devices at the end, and each device draws random numbers of its own.

    Raises:
      TypeError, ValueError: as `jmp_policy.accumulate_gradients`; for a module in the batch; where `loss_fn`
        adds Variables to the module or removes some.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_policy import StaticLossScale
      >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x):
      ...     return model(x).mean()
      >>> loss, grads = accumulate_gradients(loss_fn, 2)(StaticLossScale(8.0), model, jnp.ones((4, 1)))
      >>> float(grads.kernel[0, 0])
      8.0
    """
    if not callable(loss_fn):
        raise TypeError(f"accumulate_gradients needs a loss function, got {loss_fn!r}.")
    window = make_window(n, accumulator_dtype, axis_name, mesh, has_aux)
    gradient = scaled_value_and_grad(
        loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=has_aux, allow_int=allow_int
    )

    def value_and_scaled_grad(scale_or_optimizer: Any, model: Any, /, *args: Any, **kwargs: Any) -> Any:
        scale = find_loss_scale(scale_or_optimizer, loss)
        if others := graph_nodes.modules_in((args, kwargs)):
            raise TypeError(
                f"accumulate_gradients splits all that comes after the model, and {type(others[0]).__name__} "
                "is a module. Make one model of both, a module that holds them, and train a part of it by "
                "wrt=."
            )
        graph, params, state = nnx.split(model, wrt, ...)

        def step(scale: LossScale, params: PyTree, state: PyTree, args: Any, kwargs: Any) -> Any:
            # New Variables of this trace, which may be written to.
            merged = nnx.merge(graph, *jax.tree.map(lambda x: x, (params, state)))
            value, grads = gradient(scale, merged, *args, **kwargs)
            params_after, after = nnx.state(merged, wrt, ...)
            _check_same_variables((params, state), (params_after, after))
            return value, grads, after

        result, new_state = run_window(window, step, scale, params, state, (args, kwargs))
        nnx.update(model, new_state)
        return result

    return value_and_scaled_grad


def _check_same_variables(before: Any, after: Any) -> None:
    if different := sorted(_paths(before) ^ _paths(after)):
        raise ValueError(
            f"The loss function added Variables to the module or removed some ({', '.join(different)}), and "
            "a loop over micro-batches needs the same ones in each. Create them before (call the model once "
            "before the optimizer is made), or take what was sown out of the module (nnx.pop) and return it "
            "with has_aux."
        )


def _paths(state: Any) -> set[str]:
    return {jax.tree_util.keystr(path[1:]) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
