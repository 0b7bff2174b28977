"""Checks and starts the optax transformation that `loss_scaled`, `master_weights` and others wrap."""

from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from jmp_policy._src.core.dtypes import map_changed, strip_weak_type
from jmp_policy._src.core.types import PyTree

#: What is wrapped; at runtime any object with `init` and `update`.
Transformation: TypeAlias = optax.GradientTransformation | optax.MultiSteps


def check_inner(inner: Any, wrapper: str) -> optax.GradientTransformationExtraArgs:
    """The wrapped transformation, with support for extra arguments; raises TypeError for what is none."""
    if isinstance(inner, type) or not all(callable(getattr(inner, n, None)) for n in ("init", "update")):
        hint = " Did you forget to call it?" if callable(inner) else ""
        if hasattr(inner, "adjust"):
            hint = " The optimizer comes first: loss_scaled(optimizer, loss_scale)."
        raise TypeError(
            f"{wrapper} wraps an optax transformation (an object with init and update), such as "
            f"optax.adam(1e-3); got {inner!r}.{hint}"
        )
    return optax.with_extra_args_support(inner)


def check_state(state: Any, cls: type, wrapper: str) -> None:
    """Raises TypeError for a state that is not the wrapper's."""
    if not isinstance(state, cls):
        raise TypeError(
            f"{wrapper} got the state of another transformation ({type(state).__name__}); pass the "
            "state that its own init returned."
        )


def init_inner(inner: optax.GradientTransformationExtraArgs, params: PyTree, *others: PyTree) -> PyTree:
    """The first state of the wrapped transformation, in the structure and dtypes that its update gives.

    Some (`optax.monitor`) start with an empty dictionary, which neither a loop nor a skipped step could keep:
    what update adds starts as zeros. The state shares no buffer with `others`, which may be donated with it.
    """
    state = inner.init(params)
    if any(map(_is_empty, jax.tree.leaves(state, is_leaf=_is_empty))):
        try:
            _, later = jax.eval_shape(inner.update, params, state, params)
            state = jax.tree.map(_filled, state, later, is_leaf=_is_empty)
        except Exception:  # It needs more arguments, or differs in another way: its update will tell.
            pass
    return _unaliased(state, others)


def _is_empty(x: Any) -> bool:
    return isinstance(x, dict) and not x


def _filled(before: Any, after: Any) -> Any:
    if _is_empty(before):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), after)
    return before.astype(after.dtype) if hasattr(before, "dtype") else before


def _unaliased(state: PyTree, others: PyTree) -> PyTree:
    """Makes a state strongly typed, in buffers that it shares neither with `others` nor among its leaves.

    A weak type would compile the step twice. Some optimizers (L-BFGS) keep the very arrays of the parameters.
    """
    taken = {id(x) for x in jax.tree.leaves(others)}

    def one(x: Any) -> Any:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            if id(x) in taken:
                x = jnp.array(x)
            taken.add(id(x))
        if isinstance(x, bool | int | float | complex):
            return jnp.array(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
        return x

    return map_changed(strip_weak_type, map_changed(one, state))
