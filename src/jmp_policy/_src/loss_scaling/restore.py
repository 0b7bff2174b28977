"""Fits restored training states (from a checkpoint) into the structure and dtypes of this program's state.

Orbax and `flax.serialization` restore the very structure that was saved and nothing else, and Orbax casts to
the dtypes of its target silently. Here values are matched by name, only what `loss_scaled` and its loss
scales add may be missing, and a change of dtype is an error.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jmp_policy._src.core.dtype_words import array_type_text
from jmp_policy._src.core.dtypes import is_floating, strip_weak_type
from jmp_policy._src.core.serialization import check_depth
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.float8_state import COLLECTION
from jmp_policy._src.loss_scaling.gradients import all_finite
from jmp_policy._src.loss_scaling.loss_scale import LARGEST_SCALE, SMALLEST_SCALE

_SHOWN = 10
_SCALARS = (bool, int, float, complex)
_ABSENT = object()
#: Fields by which the states of `loss_scaled` (no other has both) and of `master_weights` are recognised: a
#: state that was read without a target has no class.
_LOSS_SCALED = frozenset(("grads_finite", "skipped"))
_MASTERS = frozenset(("inner_state", "masters"))
#: Of the fields that may be missing, those that no template of shapes can stand in for, and what does.
_NEEDED = {
    "masters": "real masters: tx.init(params) of the restored parameters",
    "loss_scale": "a real loss scale: state._replace(loss_scale=DynamicLossScale())",
}
#: What optax calls means of squared gradients, whose square root is taken.
_SECOND_MOMENTS = ("nu", "nu_max", "sum_of_squares", "v_row", "v_col")
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def restore_state(template: PyTree, saved: PyTree, *, cast: bool = False, check: bool = False) -> PyTree:
    """Fits a saved training state into the structure, the dtypes and the shardings of this program's state.

    Use it after any restore, also of a checkpoint that differs from the program's state: made by an older
    version that lacked a field, by a float32 run whose optimizer was not in `loss_scaled` yet, on other
    devices, or read without a target. Values are matched by the names on their paths.

    Args:
      template: a freshly initialised state, such as `tx.init(params)`, a `TrainState`, or
        `nnx.state(optimizer)`, or a dict of several; arrays, or `jax.ShapeDtypeStruct`s (with shardings)
        for what need not exist twice.
      saved: the restored state: of the same structure, an older one, nested dicts and lists (Orbax without a
        target, Flax state dicts), or the state of the optimizer that `loss_scaled` or `master_weights` wraps
        now.
      cast: convert numbers that were saved in another precision, instead of raising.
      check: refuse also what a damaged checkpoint may hold: NaN and infinite numbers (where the template's
        are finite), and negative counters and second moments of optimizers. It reads every value once.

    Returns:
      The template with every saved value, placed as the template's is; where the template says nothing of
      placement, JAX arrays stay where they are. What `loss_scaled` and `master_weights` add to an
      optimizer's state, and fields of loss scales, come from the template where they were not saved (masters
      that are not those of the parameters follow these in the next step). Configuration
      (`growth_interval`) is the template's. So is what float8 layers keep from step to step, where it was not
      saved; where the template has no such layers, it is left out. Parameters, and what an optimizer keeps of
      them, may be whole variables (`{"params": ...}`) on one side and bare parameters on the other. The
      result may share buffers with `saved`.

    Raises:
      ValueError: naming the paths, for what is missing, left over, of another shape, or of another dtype; for
        loss scales that no constructor takes (NaN, 0, outside of the template's bounds), and their counters.
      TypeError: when the template is an optimizer instead of its state.

    Example:
      >>> import optax
      >>> from jmp_policy import DynamicLossScale, loss_scaled
      >>> params = {"w": jnp.ones(2)}
      >>> saved = optax.adamw(1e-3).init(params)  # of a float32 run
      >>> state = restore_state(loss_scaled(optax.adamw(1e-3), DynamicLossScale()).init(params), saved)
      >>> type(state.inner_state).__name__, float(state.loss_scale.loss_scale)
      ('tuple', 65536.0)
    """
    if callable(getattr(template, "init", None)) and callable(getattr(template, "update", None)):
        raise TypeError(
            f"restore_state needs a state to fill, got a transformation ({type(template).__name__}); pass "
            "what its init(params) returns."
        )
    if isinstance(saved, str | os.PathLike):
        raise TypeError(f"restore_state takes what a checkpoint held, not its path: read {saved!r} before.")
    pairs = list(map(_with_key, _pairs(template, saved)))
    _check_structure(pairs)
    pairs = [p for p in pairs if p.wanted is not _ABSENT]
    values = [p.default() if p.field else _converted(p, cast) for p in pairs]
    _check_types(dataclasses.replace(p, given=v) for p, v in zip(pairs, values, strict=True))
    _check_values(pairs, values, check)
    placed = [_placed(value, p.wanted) for p, value in zip(pairs, values, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(template), placed)


def check_restored(restored: PyTree, expected: PyTree) -> None:
    """Raises when the paths, shapes or dtypes of a restored state are not those of the expected state.

    Orbax, given a target, casts to its dtypes silently: a checkpoint of bfloat16 parameters makes float32
    ones that have lost their digits. So compare the metadata of the checkpoint before restoring it:
    `check_restored(checkpointer.metadata(path).item_metadata, expected)`, or a `CheckpointManager`'s
    `item_metadata(step)`, which is None without `item_handlers`. `restore_state` checks its input itself.

    Args:
      restored: a pytree of arrays, of `jax.ShapeDtypeStruct`s, or of Orbax's metadata.
      expected: the state of this program; arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: naming the first ten paths, with dtype and shape as expected and as restored. A strong type
        that became weak counts (it promotes differently, and compiles again); a weak one that became strong
        does not, since no checkpoint holds weak types.

    Example:
      >>> check_restored({"w": jnp.ones(2, jnp.bfloat16)}, {"w": jnp.ones(2)})
      Traceback (most recent call last):
      ValueError: 1 restored value is not of the type that was expected:
        w: float32[2] -> bfloat16[2]: saved in lower precision; the float32 values (masters) are lost
    """
    pairs = [
        _with_key(dataclasses.replace(p, field=""), typed=False)
        for p in _pairs(expected, restored, exact=True)
    ]
    _check_structure(pairs)
    _check_types(pairs)


class _Limits(NamedTuple):
    """Between which numbers a leaf must lie: `always`, or where damage is looked for."""

    low: float
    high: float
    always: bool = True


#: Magnitudes of the last gradients, for `metrics`, are infinite after a skipped step.
_ANYTHING = _Limits(-np.inf, np.inf, always=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair:
    """Leaf of the template and the saved leaf on the same path; one of them may be absent.

    `field` names the field of the wrapper's state that the leaf belongs to, or the collection of float8
    layers, "" for other leaves. A leaf with a field need not have been saved: it then takes the template's
    value. One of the collection need not be wanted.
    """

    path: str
    wanted: Any
    given: Any = _ABSENT
    field: str = ""
    limits: _Limits | None = None

    def default(self) -> Any:
        """The value of a freshly initialised state."""
        if not isinstance(self.wanted, jax.ShapeDtypeStruct):
            return jnp.array(self.wanted)  # A copy: the restored state may be donated.
        if self.field in _NEEDED:
            raise ValueError(
                f"{self.path} was not saved, and the template has only its shape. Give the template "
                f"{_NEEDED[self.field]}."
            )
        return jnp.full(self.wanted.shape, self.field == "grads_finite", self.wanted.dtype)


def _pairs(template: Any, saved: Any, exact: bool = False) -> list[_Pair]:
    check_depth(template, "The state", limit=100)
    check_depth(saved, "What was saved", limit=100)
    return list(_match("", template, saved, exact=exact))


def _with_key(pair: _Pair, *, typed: bool = True) -> _Pair:
    """The pair with a random key in place of its data, as Orbax reads one as a NumPy array.

    Where only types are compared (`typed` is False), the one that is wanted is in its place.
    """
    dtype, impls = getattr(pair.wanted, "dtype", None), list[Any]()
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or not hasattr(pair.given, "dtype"):
        return pair

    def data_of(key: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(key))  # Known of a shape alone, too.
        return jax.random.key_data(key)

    data, given = jax.eval_shape(data_of, pair.wanted), pair.given
    if (data.shape, data.dtype) != (np.shape(given), given.dtype):
        return pair
    key = jax.random.wrap_key_data(jnp.asarray(given), impl=impls[0]) if typed else pair.wanted
    return dataclasses.replace(pair, given=key)


def _match(
    path: str,
    wanted: Any,
    given: Any,
    field: str = "",
    exact: bool = False,
    limits: _Limits | None = None,
) -> Iterator[_Pair]:
    """Yields every leaf of the template with the saved leaf, in the template's order; then leaves only saved.

    With `exact`, parameters and whole variables that hold nothing else do not match. Nodes without leaves
    (None, `optax.EmptyState`) are ignored: checkpoints differ in how they write them.
    """
    children, found = _children(wanted), _children(given)
    if children is None:
        (leaf,) = jax.tree.leaves(wanted)
        if found is None:
            (value,) = jax.tree.leaves(given)
            yield _Pair(path, leaf, value, limits=limits)
        else:
            yield _Pair(path, leaf, field=field)
            yield from _left_over(path, given)
        return
    # Whole variables name the parameters. Beside the state of float8 layers they must, and Flax's TrainState
    # then gives the optimizer what is under the name; without that state it gives it what it has.
    if found and "params" not in found and found.keys() & _parameters(children, exact).keys():
        found = {"params": given}
    elif found and "params" not in children and children.keys() & _parameters(found, exact).keys():
        given, found = found["params"], _children(found["params"])
    saved = found or {}
    wraps = next((fields for fields in (_LOSS_SCALED, _MASTERS) if children.keys() >= fields), None)
    # Of an older version, one of loss_scaled's fields may be missing.
    if wraps and not (saved.keys() >= wraps or (saved.keys() & wraps & _LOSS_SCALED)):
        found = saved = {"inner_state": given}
    if _is_loss_scale(wanted) and children.keys() & saved.keys():
        field = field or "loss_scale"
    is_of_scale = field == "loss_scale" or wraps == _LOSS_SCALED
    has_moments = hasattr(wanted, "_fields") or children.keys() >= {"count", "mu", "nu"}
    for name, child in children.items():
        is_field = (wraps and name != "inner_state") or name == COLLECTION
        child_field = name if is_field else field
        inside = None if limits and limits.always else limits
        if is_of_scale:
            inside = _leaf_limits(name, wanted) or inside
        elif has_moments and name in _SECOND_MOMENTS:
            inside = _Limits(0, np.inf, always=False)
        yield from _match(_join(path, name), child, saved.get(name), child_field, exact, inside)
    if found is None:
        yield _Pair(path, _ABSENT, given)
    # A program that scales no loss any more has no use for the scale.
    unused = "loss_scale" if _is_loss_scale(wanted) and not children else ""
    for name, child in saved.items():
        if name not in children:
            yield from _left_over(_join(path, name), child, name if name == COLLECTION else unused)


def _left_over(path: str, given: Any, field: str = "") -> Iterator[_Pair]:
    for inner, leaf in jax.tree_util.tree_leaves_with_path(given):
        place = _join(path, jax.tree_util.keystr(inner, simple=True, separator="/"))
        yield _Pair(place, _ABSENT, leaf, field)


def _children(node: Any) -> dict[str, Any] | None:
    """The children of a pytree's node by name, list items by number; None for a leaf and a box around one.

    Boxes are metadata such as `nnx.Variable` and `nn.Partitioned`, and {"value": array}, which is what Orbax
    restores for a Variable without a target.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if flat and not flat[0][0]:
        return None
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in flat]
    if len(set(names)) < len(names):
        raise ValueError(f"The keys {names} of a {type(node).__name__} are not different as text.")
    children = dict(zip(names, (child for _, child in flat), strict=True))
    is_box = names == ["value"] and _children(children["value"]) is None
    return None if is_box else children


def _parameters(children: dict[str, Any], exact: bool) -> dict[str, Any]:
    """The parameters of whole variables (`exact`: with float8's state); for other nodes nothing."""
    if "params" not in children or not children.keys() <= {"params", COLLECTION}:
        return {}
    return {} if exact and COLLECTION not in children else _children(children["params"]) or {}


def _is_loss_scale(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and all(hasattr(type(node), n) for n in ("unscale", "adjust"))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name


def _check_structure(pairs: list[_Pair]) -> None:
    missing = [f"{p.path}: {_show(p.wanted)}" for p in pairs if p.given is _ABSENT and not p.field]
    left_over = [f"{p.path}: {_show(p.given)}" for p in pairs if p.wanted is _ABSENT and not p.field]
    reshaped = [
        f"{p.path}: {_show(p.wanted)} -> {_show(p.given)}"
        for p in pairs
        if not (p.wanted is _ABSENT or p.given is _ABSENT) and np.shape(p.wanted) != np.shape(p.given)
    ]
    lists = {"missing": missing, "left over": left_over, "of another shape": reshaped}
    parts = [f"{len(found)} {what}:\n{_first(found)}" for what, found in lists.items() if found]
    if parts:
        names = {name for p in pairs if p.wanted is _ABSENT and not p.field for name in p.path.split("/")}
        hints = [hint for name, hint in _HINTS.items() if name in names][:1]
        raise ValueError("\n".join(["What was saved does not fit this program's state.", *parts, *hints]))


#: What to do about fields that were saved and are not in the template; the first that is there.
_HINTS = {
    "grads_finite": "The saved optimizer state is one of loss_scaled, the template's is not: wrap its "
    "optimizer in loss_scaled too (with NoOpLossScale() where nothing is to be scaled), or pass "
    ".inner_state.",
    "masters": "The saved optimizer state is one of master_weights, the template's is not: wrap its "
    "optimizer in master_weights too, or pass .inner_state, and .masters as the parameters.",
    "loss_scale": "Was it saved with another kind of loss scale, or with one where there are several now? "
    "To start with the template's, put None in the place of the saved one: state._replace(loss_scale=None) "
    "for the state of loss_scaled, state['loss_scale'] = None where that was read as a dict.",
    "gradients": "Give loss_scaled the same monitor=, or remove the saved gradients; they serve metrics "
    "only.",
}


def _check_types(pairs: Iterable[_Pair]) -> None:
    changes = [f"{p.path}: {change}" for p in pairs if (change := _change(p.wanted, p.given))]
    if changes:
        values = "1 restored value is" if len(changes) == 1 else f"{len(changes)} restored values are"
        raise ValueError(f"{values} not of the type that was expected:\n{_first(changes)}")


def _check_values(pairs: list[_Pair], values: list[Any], check: bool) -> None:
    saved = [(p, value) for p, value in zip(pairs, values, strict=True) if p.given is not _ABSENT]
    damage = [f"{p.path}: {what}" for p, value in saved if (what := _damage(p, value, check))]
    if damage:
        raise ValueError(
            f"What was saved is damaged, or of a program with other bounds:\n{_first(damage)}\nRestore an "
            "older checkpoint. To begin with the template's loss scale, remove the saved loss_scale."
        )


def _damage(pair: _Pair, value: Any, check: bool) -> str:
    """Describes what no training state has in a leaf; returns "" where there is nothing."""
    if isinstance(value, jax.core.Tracer) or pair.limits is _ANYTHING:
        return ""
    if pair.limits and (check or pair.limits.always):
        low, high, _ = pair.limits
        number = jnp.asarray(value)  # NumPy warns of NaN.
        if not jnp.all((number >= low) & (number <= high)):
            return f"{_text(value)}, outside [{low:g}, {high:g}]"
    if not check or _kind(value) is None:
        return ""
    if not all_finite(value):
        known = isinstance(pair.wanted, jax.ShapeDtypeStruct) or all_finite(pair.wanted)
        return "not finite" if known or np.isnan(np.asarray(value)).any() else ""
    is_count = _kind(value) is jnp.integer and np.shape(value) == ()
    return f"{_text(value)}, a negative count" if is_count and value < 0 else ""


def _text(value: Any) -> str:
    return f"{np.asarray(value).item():g}" if np.shape(value) == () else "some values"


def _change(wanted: Any, given: Any) -> str:
    """Describes how the type of a leaf has changed; returns "" where it has not."""
    change = f"{_show(wanted)} -> {_show(given)}"
    if isinstance(wanted, _SCALARS):
        return "" if _kind(wanted) is _kind(given) else change
    if not hasattr(wanted, "dtype"):
        return "" if type(given) is type(wanted) else f"{type(wanted).__name__} -> {_show(given)}"
    before, after = wanted.dtype, getattr(given, "dtype", None)
    if after != before:
        if after is not None and is_floating(before) and is_floating(after):
            if jnp.finfo(after).bits < jnp.finfo(before).bits:
                return f"{change}: saved in lower precision; the {before} values (masters) are lost"
            return f"{change}: saved in another precision; restore_state(..., cast=True) converts"
        return change
    if _is_weak(given) and not _is_weak(wanted):
        return f"{change}: a weak type promotes differently and compiles the step again"
    return ""


def _converted(pair: _Pair, cast: bool) -> Any:
    """Converts a saved value to a Python number or a strongly typed array, as the template's is.

    With `cast` it is cast to the template's dtype if both are of one kind (integer, floating, ...).
    """
    wanted, given = pair.wanted, pair.given
    if isinstance(wanted, _SCALARS):
        return type(wanted)(np.asarray(given).item()) if _kind(given) is _kind(wanted) else given
    if not hasattr(wanted, "dtype"):
        return given
    if isinstance(given, _SCALARS):
        given = np.asarray(given, jax.dtypes.canonicalize_dtype(np.asarray(given).dtype))
    if not cast or _kind(given) is None or _kind(given) is not _kind(wanted):
        return given if _is_weak(wanted) else strip_weak_type(given)
    if _kind(wanted) is jnp.integer:
        new = np.asarray(given).astype(wanted.dtype)
        return new if (new == np.asarray(given)).all() else given
    return given.astype(wanted.dtype)


def _placed(value: Any, wanted: Any) -> Any:
    """Places a value on the devices of the template's value."""
    if not hasattr(wanted, "dtype") or not hasattr(value, "dtype"):
        return value
    sharding = getattr(wanted, "sharding", None)
    if isinstance(wanted, jax.Array) and not wanted.committed:
        sharding = None
        # Committed to one device, as Orbax restores such a scalar, it could not meet arrays on several.
        if isinstance(value, jax.Array) and value.committed and value.is_fully_addressable:
            value = _uncommitted(value)
    if sharding is None:
        return value if isinstance(value, jax.Array) else jnp.array(value)
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        sharding = sharding.spec  # jax.set_mesh says on which devices.
    return jax.device_put(value, sharding)


def _uncommitted(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.array(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.array(np.asarray(x))


def _kind(x: Any) -> Any:
    dtype = np.asarray(x).dtype if isinstance(x, _SCALARS) else getattr(x, "dtype", None)
    return next((kind for kind in _KINDS if dtype is not None and jnp.issubdtype(dtype, kind)), None)


def _is_weak(x: Any) -> bool:
    return isinstance(x, _SCALARS) or bool(getattr(x, "weak_type", False))


def _show(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return f"{type(x).__name__} (a Python number)" if isinstance(x, _SCALARS) else type(x).__name__
    return f"{array_type_text(x)}{' (weak)' * _is_weak(x)}"


def _first(lines: list[str]) -> str:
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join(f"  {line}" for line in [*lines[:_SHOWN], *more])


_COUNTS = ("growth_tracker", "hysteresis_tracker", "clean_steps", "skipped", "consecutive_skips", "steps")


def _leaf_limits(name: str, scale: Any) -> _Limits | None:
    """Between which numbers a leaf of a loss scale, or of the state of `loss_scaled`, must lie.

    Args:
      name: of the leaf.
      scale: the loss scale, whose bounds count; where only its leaves are known, what holds them.
    """
    low = getattr(scale, "min_loss_scale", SMALLEST_SCALE)
    high = getattr(scale, "max_loss_scale", LARGEST_SCALE)
    count = _Limits(0, 2**31 - 2)  # One less than an int32 holds: the next step may add one.
    return {
        **dict.fromkeys(_COUNTS, count),
        "loss_scale": _Limits(float(np.float32(low)), float(np.float32(high))),
        "log2_scale": _Limits(math.floor(math.log2(low)), math.ceil(math.log2(high))),
        "clean_scale": _Limits(SMALLEST_SCALE, 2.0**127),
        "failed_scale": _Limits(SMALLEST_SCALE, 2.0**127),
        "widened": _Limits(0, 1000),
        "integral": _Limits(-LARGEST_SCALE, LARGEST_SCALE),
        "previous_error": _Limits(-LARGEST_SCALE, LARGEST_SCALE),
        "gradients": _ANYTHING,
    }.get(name)
