"""Taps: identities on activations that count what passes, forward and backward, while somebody looks.

No callbacks and no side effects: what a tap counts leaves the backward pass as the cotangent of an argument,
its sink, which is zero. So it works under jit, in scans and under remat, and adds up over the trips of a
loop. While nobody looks a tap is the very value it was given.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


class Taps:
    """Who looks: the sinks by name, and what counts. Compared by identity: each look traces anew.

    Args:
      count: from an array and 1 / loss scale to a vector of counts.
      sinks: zeros by name, of shape (2, counts); None to only find out the names.
      inverse_scale: 1 / loss scale of the backward pass.
    """

    def __init__(
        self, count: Callable[[Any, Any], Any], sinks: dict[str, Any] | None = None, inverse_scale: Any = 1.0
    ):
        self.count = count
        self.sinks = sinks
        self.inverse_scale = inverse_scale
        self.met: dict[str, Any] = {}

    def pass_through(self, x: Any, name: str) -> Any:
        """The value, watched."""
        self.met.setdefault(name, jax.typeof(x))
        if self.sinks is None or name not in self.sinks:
            return x
        sink = _varying_like(self.sinks[name], x)
        inverse = _varying_like(jnp.asarray(self.inverse_scale, jnp.float32), x)
        return _watched(self.count, x, sink, inverse)


_CONTEXT = jax.make_user_context(default_value=None)


def current() -> Taps | None:
    """Who looks in this thread, or None."""
    return _CONTEXT.value


@contextlib.contextmanager
def looking(taps: Taps) -> Iterator[Taps]:
    """Makes taps count for the length of a with-block."""
    with _CONTEXT(taps):
        yield taps
    # The cache of jit keeps the context; the tracers must not live on in it.
    taps.sinks, taps.inverse_scale = None, 1.0


def tap(x: T, name: str) -> T:
    """Names a value for `gradient_spectrum`, in functions that no Flax module names.

    Args:
      x: an array, or a pytree of which the floating arrays are watched.
      name: what the report calls it; of several arrays each gets its path added. Equal names add up.

    Returns:
      The same value; the very same object while nobody looks.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones(3)
      >>> tap(x, "hidden") is x
      True
    """
    taps = current()
    if taps is None:
        return x

    def watch(path: Sequence[Any], leaf: Any) -> Any:
        is_floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not is_floating or not isinstance(leaf, jax.Array):
            return leaf
        return taps.pass_through(leaf, name + jax.tree_util.keystr(tuple(path)))

    return jax.tree_util.tree_map_with_path(watch, x)


def _varying_like(value: Any, x: Any) -> Any:
    """A value that varies over the devices that an array varies over, whose cotangents then add up."""
    missing = getattr(jax.typeof(x), "vma", frozenset()) - getattr(jax.typeof(value), "vma", frozenset())
    if not missing:
        return value
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying")


def _forward(count: Any, x: Any, sink: Any, inverse_scale: Any) -> Any:
    return x, (count(x, 1.0), inverse_scale)


def _backward(count: Any, residuals: Any, cotangent: Any) -> Any:
    counts, inverse_scale = residuals
    seen = jnp.stack([counts, count(cotangent, inverse_scale)])
    return cotangent, seen, jnp.zeros_like(inverse_scale)


def _pass(count: Any, x: Any, sink: Any, inverse_scale: Any) -> Any:
    return x


_watched = jax.custom_vjp(_pass, nondiff_argnums=(0,))
_watched.defvjp(_forward, _backward)
