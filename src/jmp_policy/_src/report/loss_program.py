"""Makes programs of a function that a report runs: a loss with its gradients, or all its results by name."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_policy._src.core.dtypes import promote_dtype
from jmp_policy._src.jaxpr.flatten import is_array
from jmp_policy._src.loss_scaling.float16_loss import first_cotangent
from jmp_policy._src.loss_scaling.value_and_grad import split_loss
from jmp_policy._src.report.function import Function, replaced


def returns_scalar(function: Function) -> bool:
    """Returns whether a function's result is one number, as a loss is."""
    result: list[Any] = []

    def run(arrays: Sequence[Any]) -> None:
        result.append(function.result(arrays))

    jax.eval_shape(run, function.arrays)
    is_one = jax.tree.structure(result[0]) == jax.tree.structure(0)
    return is_one and jnp.shape(result[0]) == ()


def trained_arguments(function: Function, use: str) -> list[int]:
    """Returns which arrays are the parameters of a loss; raises ValueError if none is."""
    trained = function.trained()
    if not trained:
        raise ValueError(f"{use} found no floating arrays in the parameters of {function.name}.")
    return trained


def value_and_gradients(
    function: Function, trained: Sequence[int], loss_scale: Any, has_aux: bool
) -> Callable[..., Any]:
    """Returns a function to the loss, the loss times its scale, and the gradients of the latter."""

    def program(arrays: Sequence[Any]) -> Any:
        def scaled(params: Sequence[Any]) -> Any:
            loss, _ = split_loss(function.result(replaced(arrays, trained, params)), has_aux)
            loss = jnp.asarray(loss)
            seed = jnp.asarray(first_cotangent(loss.dtype, loss_scale), jnp.float32)
            product = loss.astype(promote_dtype(loss.dtype)) * seed
            return product, loss

        (product, loss), grads = jax.value_and_grad(scaled, has_aux=True)([arrays[i] for i in trained])
        return [loss, product, *grads]

    return program


def named_results(function: Function) -> tuple[Callable[..., Any], list[str]]:
    """Returns a function to the arrays among all results, and a list that holds their names once it ran."""
    names: list[str] = []

    def program(arrays: Sequence[Any]) -> list[Any]:
        paths = jax.tree_util.tree_leaves_with_path(function.call(arrays))
        kept = [(path, leaf) for path, leaf in paths if is_array(leaf)]
        names[:] = [
            "/".join(["result", *(jax.tree_util.keystr((k,), simple=True) for k in p)]) for p, _ in kept
        ]
        return [leaf for _, leaf in kept]

    return program, names
