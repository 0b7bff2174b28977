"""The optimizer state of `loss_scaled`, found inside any other one, and that of the transformation inside."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from jmp_policy._src.core.classes import imported_attr
from jmp_policy._src.core.dtypes import map_changed, strip_weak_type
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling import placement, scale_mistakes
from jmp_policy._src.loss_scaling.forgotten_scale import SCALE_USE
from jmp_policy._src.loss_scaling.loss_scale import LossScale, is_loss_scale
from jmp_policy._src.loss_scaling.loss_scales import LossScales, are_several, pick

#: What is wrapped; at runtime any object with `init` and `update`.
Transformation: TypeAlias = optax.GradientTransformation | optax.MultiSteps


class LossScaledState(NamedTuple):
    """State of `loss_scaled`.

    Attributes:
      inner_state: state of the wrapped transformation, as of the last finite step.
      loss_scale: the loss scale that the next loss is to be multiplied by; of several losses a `LossScales`,
        with `loss_scale["name"]` for each.
      grads_finite: whether the last step's gradients were finite, and the step taken; boolean scalar.
      skipped, consecutive_skips: steps skipped so far, and in a row until now; int32 scalars, saturating.
      steps: updates seen so far, skipped ones included; int32 scalar, saturating.
      gradients: magnitudes of the last gradients by group, with `loss_scaled(..., monitor=True)`; or None.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import StaticLossScale, loss_scaled
      >>> state = loss_scaled(optax.sgd(0.1), StaticLossScale(8.0)).init(jnp.ones(2))
      >>> int(state.steps), bool(state.grads_finite)
      (0, True)
    """

    inner_state: optax.OptState
    loss_scale: Any
    grads_finite: jax.Array
    skipped: jax.Array
    consecutive_skips: jax.Array
    steps: jax.Array
    gradients: Any = None


def find_loss_scale(scale_or_state: Any, loss: str | None = None) -> LossScale:
    """The loss scale, of several that of `loss`, in itself or in what `get_loss_scale_state` takes."""
    scale, state = scale_or_state, None
    if not is_scale(scale):
        path, state = find_one(scale)
        scale = unwrapped(state.loss_scale)
        # A TrainState holds it too, and is no tuple.
        is_around = path and (path != ".opt_state" or isinstance(scale_or_state, tuple))
        if is_around and (around := placement.misplaced(scale_or_state, state)):
            warnings.warn(around, UserWarning, stacklevel=3)
    if loss is not None or not is_loss_scale(scale):
        scale = pick(scale, loss)
    SCALE_USE.note(scale, state)
    return scale


def is_scale(x: Any) -> bool:
    """Whether a value is a loss scale or several by name, not a state that holds them."""
    return is_loss_scale(x) or (isinstance(x, Mapping | LossScales) and are_several(x))


def find_one(opt_state: PyTree) -> tuple[str, LossScaledState]:
    """Finds the one state of `loss_scaled` in an optimizer state, and its path, or raises ValueError."""
    found = list(_find(opt_state))
    if len(found) != 1:
        raise scale_mistakes.not_one(type(opt_state).__name__, [path for path, _ in found])
    check_no_number(found[0][1])
    return found[0]


def check_no_number(state: LossScaledState) -> None:
    """Raises TypeError for a number in the place of the loss scale, as optax's `tree_set` puts it there."""
    if isinstance(state.loss_scale, jax.Array | np.ndarray | np.generic | int | float):
        raise scale_mistakes.is_number(state.loss_scale)


def _find(tree: PyTree, prefix: str = "") -> Iterator[tuple[str, LossScaledState]]:
    def is_one(x: Any) -> bool:
        return isinstance(x, LossScaledState)

    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_one)[0]:
        if is_one(leaf):
            place = prefix + jax.tree_util.keystr(path)
            yield place, leaf
            yield from _find(leaf.inner_state, f"{place}.inner_state")


def unwrapped(state: Any) -> Any:
    """The state with plain arrays, where `nnx.Optimizer` has put them into Variables."""
    variable = imported_attr("flax.nnx", "Variable")
    if variable is None:  # NNX was never imported.
        return state

    def is_variable(x: Any) -> bool:
        return isinstance(x, variable)

    return map_changed(lambda x: x.get_value() if is_variable(x) else x, state, is_variable)


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
