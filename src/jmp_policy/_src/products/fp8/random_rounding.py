"""The key from which bits are drawn to round gradients at random, under a recipe that does so."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: The stream of Flax's random numbers that is used; TransformerEngine's name.
STREAM = "sr_rng"


class _Keys:
    """A key, and how many keys were made of it. Equal to nothing else, for the caches of `jax.jit`."""

    def __init__(self, key: Any):
        self.key, self.count = key, 0

    def next(self) -> Any:
        self.count += 1
        return jax.random.fold_in(self.key, self.count)


#: The keys of this thread, or None.
_KEYS = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def rounding_key(key: Any) -> Iterator[None]:
    """Gives the recipe "nvfp4" a key, in a with-block, to round gradients at random.

    It has to be around the forward pass, inside of what is differentiated and compiled. Each product draws
    its own bits; what is traced once and runs often, as the body of a loop or a `jax.jit` inside, draws the
    same each time, unless it opens a block of its own, with `jax.random.fold_in(key, i)`. Linen modules may
    get `rngs={"sr_rng": key}` in its place, which goes first.

    Args:
      key: one of `jax.random.key`, another one in each step: a scalar.

    Raises:
      TypeError: for what is no key.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_policy as jmpp
      >>> def loss(w, x, key):
      ...     with jmpp.rounding_key(key):
      ...         return (jmpp.autocast(lambda w, x: jnp.tanh(x @ w) @ w, lower="nvfp4")(w, x) ** 2).mean()
      >>> jax.grad(loss)(jnp.ones((64, 64)), jnp.ones((32, 64)), jax.random.key(0)).dtype
      dtype('float32')
    """
    if not is_key(key):
        raise TypeError(
            f"rounding_key takes one key, as jax.random.key(0) makes it, of shape (), got {key!r}."
        )
    with _KEYS(_Keys(as_key(key))):
        yield


def is_key(key: Any) -> bool:
    """Whether a value is one random key, of either kind."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return shape == ()
    return dtype == jnp.uint32 and len(shape or ()) == 1


def as_key(key: Any) -> Any:
    """A key as one with a dtype of its own."""
    is_typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key if is_typed else jax.random.wrap_key_data(key)


def next_key() -> Any:
    """Data of a key for one product, uint32 of shape (2,); a number where there is no key."""
    keys = _KEYS.value
    return np.float32(1) if keys is None else data_of(keys.next())


def data_of(key: Any) -> Any:
    """The first two words of a key's data: a threefry key of its own, whatever the kind of the key."""
    return jax.random.key_data(key)[:2]


def check_key(data: Any) -> None:
    """Raises ValueError where a gradient is to be rounded at random, and the forward pass had no key."""
    if jnp.result_type(data) != jnp.uint32:
        raise ValueError(
            "The recipe nvfp4 rounds gradients at random, and the forward pass was given no key. Give it one "
            f"in each step: model.apply(params, x, rngs={{{STREAM!r}: key}}) for a Linen module (and "
            f"split_rngs={{{STREAM!r}: True}} in nn.scan), `with jmp_policy.rounding_key(key):` around the "
            "forward pass of anything else; or round to nearest: the recipe 'nvfp4-sr'."
        )
