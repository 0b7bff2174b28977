"""Whole training steps, `(state, batch) -> (state, loss)`, and models by hand and with jmp_policy."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks.models._model import Model

ADAMW = optax.adamw(1e-4)


class State(NamedTuple):
    params: Any
    stats: Any
    opt_state: Any
    scale: Any = ()


class HandScale(NamedTuple):
    """The dynamic loss scale of the recipe, as it stands in many training scripts."""

    value: jax.Array
    clean: jax.Array


class Variant(NamedTuple):
    """A way to train: `make_step(model, tx, loss=...)` makes the step, `make_scale()` a scale beside `tx`."""

    model: Any
    tx: Any
    make_step: Any
    make_scale: Any = tuple


def plain(model: Any) -> Variant:
    return Variant(model, ADAMW, plain_step)


def times_constant(model: Any, factor: float) -> Variant:
    """Without loss scaling, of a constant times the loss, which AdamW's updates hardly depend on.

    Its gradients are as large as scaled ones. Without, most of a large model's are 0 in float16, and a GPU
    multiplies zeros with less power, and so faster.
    """

    def step(model: Any, tx: Any, loss: Any) -> Any:
        return plain_step(model, tx, loss=lambda *args: factor * loss(*args))

    return Variant(model, ADAMW, step)


def autocast(model: Any, dtype: str) -> Variant:
    return Variant(model, ADAMW, functools.partial(plain_step, autocast=dtype))


def hand_scaled(model: Any) -> Variant:
    return Variant(model, ADAMW, hand_scaled_step, hand_scale)


def scaled(model: Any, scale: Any = None) -> Variant:
    return Variant(model, jmpp.loss_scaled(ADAMW, scale or jmpp.DynamicLossScale()), library_step)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_and_stats(
    model: Any, params: Any, stats: Any, batch: Any, loss: Any = cross_entropy
) -> tuple[jax.Array, Any]:
    """The loss, and the batch statistics after it; `batch` is `(inputs, labels)`, several inputs a tuple."""
    inputs, labels = batch
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    if not stats:
        return loss(model.apply({"params": params}, *inputs), labels), stats
    variables = {"params": params, "batch_stats": stats}
    outputs, new = model.apply(variables, *inputs, mutable=["batch_stats"])
    return loss(outputs, labels), new["batch_stats"]


def init(model: Any, tx: Any, batch: Any, scale: Any = (), key: Any = None) -> State:
    inputs = batch[0] if isinstance(batch[0], tuple) else (batch[0],)
    variables = model.init(jax.random.key(0) if key is None else key, *inputs)
    params = variables["params"]
    return State(params, variables.get("batch_stats", {}), tx.init(params), scale)


def all_begun(made: dict[str, Variant], batch: Any, loss: Any = cross_entropy) -> dict[str, Any]:
    """What makes each step and its first state."""
    return {name: functools.partial(begun, variant, batch, loss) for name, variant in made.items()}


def begun(variant: Any, batch: Any, loss: Any = cross_entropy) -> tuple[Any, State]:
    """The step of a variant and its first state."""
    model, tx, make_step, make_scale = variant
    state = jax.jit(lambda batch: init(model, tx, batch))(batch)
    return make_step(model, tx, loss=loss), state._replace(scale=make_scale())


def types(variant: Any, trained: Model) -> tuple[Any, tuple[State, Any]]:
    """The step of a variant of a model, jitted, and the types of its arguments."""
    model, tx, make_step, make_scale = variant
    batch = trained.shapes()
    state = jax.eval_shape(lambda batch: init(model, tx, batch, make_scale()), batch)
    return jax.jit(make_step(model, tx, loss=trained.loss), donate_argnums=0), (state, batch)


def hand_scale() -> HandScale:
    return HandScale(jnp.float32(2.0**16), jnp.int32(0))


def plain_step(model: Any, tx: Any, autocast: Any = None, loss: Any = cross_entropy) -> Any:
    """No loss scaling at all; `autocast` is the half type that the loss is put under, if any."""

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        def loss_fn(params: Any) -> Any:
            return loss_and_stats(model, params, state.stats, batch, loss)

        loss_fn = loss_fn if autocast is None else jmpp.autocast(loss_fn, autocast)
        (value, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), stats, opt_state), value

    return step


def hand_scaled_step(model: Any, tx: Any, loss: Any = cross_entropy) -> Any:
    """Dynamic loss scaling by hand: one test per parameter, and a select."""

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        scale = state.scale

        def loss_fn(params: Any) -> Any:
            value, stats = loss_and_stats(model, params, state.stats, batch, loss)
            return value * scale.value, (value, stats)

        (_, (value, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = jax.tree.map(lambda g: g / scale.value, grads)
        finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), stats, opt_state
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, tuple(state[:3]))
        grow = scale.clean == 1999
        next_scale = jnp.where(finite, scale.value * jnp.where(grow, 2.0, 1.0), scale.value * 0.5)
        clean = jnp.where(finite & ~grow, scale.clean + 1, 0)
        return State(*kept, HandScale(jnp.clip(next_scale, 2.0**-14, 2.0**24), clean)), value

    return step


def library_step(model: Any, tx: Any, loss: Any = cross_entropy) -> Any:
    """The step of the documentation; `tx` is made by `jmp_policy.loss_scaled`."""

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        def loss_fn(params: Any) -> Any:
            return loss_and_stats(model, params, state.stats, batch, loss)

        gradient = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)
        (value, stats), grads = gradient(state.opt_state, state.params)
        return updated(state, tx, grads, stats), value

    return step


def updated(state: State, tx: Any, grads: Any, stats: Any) -> State:
    """The state after an update by `loss_scaled`; a step that is skipped keeps the statistics."""
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    if stats:
        stats = jmpp.select_tree(jmpp.grads_finite(opt_state), stats, state.stats)
    return State(optax.apply_updates(state.params, updates), stats, opt_state)


@dataclasses.dataclass(frozen=True)
class ByHand:
    """A Linen module as its author would write it for half precision: `dtype=` in every layer.

    The models of the zoo have no precision code. Flax's layers take `dtype=float16` (their attention then has
    its softmax in half, too, which costs least), raw parameters are cast where they are read, and the inputs
    where they come in.
    """

    module: nn.Module
    dtype: Any

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Without dtypes: Flax's weight normalisation would store the half weights that it hands on."""
        return self.module.init(*args, **kwargs)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        with _layers_in(self.dtype):
            return self.module.apply(variables, *_cast(args, self.dtype), **kwargs)


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(x: Any) -> Any:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


@contextlib.contextmanager
def _layers_in(dtype: Any) -> Iterator[None]:
    made, read = nn.Module.__post_init__, nn.Module.param

    def post_init(self: Any) -> None:
        if _is_layer(self) and getattr(self, "dtype", 0) is None:
            object.__setattr__(self, "dtype", dtype)
        made(self)

    def param(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = read(self, *args, **kwargs)
        return value if _is_layer(self) else _cast(value, dtype)

    with (
        mock.patch.object(nn.Module, "__post_init__", post_init),
        mock.patch.object(nn.Module, "param", param),
    ):
        yield


def _is_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("flax.linen")
