"""Taps: identities on activations that count what passes, forward and backward, while somebody looks.

No callbacks and no side effects: what a tap counts leaves the backward pass as the cotangent of an argument,
its sink, which is zero. So it works under jit, in scans and under remat, and adds up over the trips of a
loop. While nobody looks a tap is the very value it was given.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jmp_policy._src.jaxpr.compat import varying

T = TypeVar("T")
W = TypeVar("W")


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

    def returned(self, name: str, module: Any, args: Any, kwargs: Any, out: T) -> T:
        """What a module returned, watched."""
        return tap(out, name)

    def pass_through(self, x: Any, name: str) -> Any:
        """The value, watched."""
        self.met.setdefault(name, jax.typeof(x))
        if self.sinks is None or name not in self.sinks:
            return x
        sink = _varying_like(self.sinks[name], x)
        inverse = _varying_like(jnp.asarray(self.inverse_scale, jnp.float32), x)
        return _watched(self.count, x, sink, inverse)


class Call(NamedTuple):
    """One call of a module's method.

    Args:
      name: of the model's class and the attributes on the way to the module.
      module: the module; its values are of a trace that has ended.
      receives, returns: dtypes of the floating arrays that it was called with, and gave back.
    """

    name: str
    module: Any
    receives: tuple[str, ...]
    returns: tuple[str, ...]


class Calls:
    """Writes down every call of a module, and changes nothing.

    Args:
      note: from a module to what else is to be known of it, while it is called.
    """

    def __init__(self, note: Callable[[Any], Any] = lambda module: None):
        self._note = note
        self.calls: list[tuple[Call, Any]] = []

    def returned(self, name: str, module: Any, args: Any, kwargs: Any, out: T) -> T:
        """What a module returned, as it is."""
        call = Call(name, module, _dtypes((args, kwargs)), _dtypes(out))
        self.calls.append((call, self._note(module)))
        return out


def _dtypes(tree: Any) -> tuple[str, ...]:
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and hasattr(x, "shape")]
    return tuple(dict.fromkeys(str(x.dtype) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)))


_CONTEXT = jax.make_user_context(default_value=None)


def current() -> Any:
    """Who looks in this thread: `Taps`, `Calls` or None."""
    return _CONTEXT.value


def returned(name: str, module: Any, args: Any, kwargs: Any, out: T) -> T:
    """What a module's method returned, for whoever looks."""
    watcher = current()
    return out if watcher is None else watcher.returned(name, module, args, kwargs, out)


@contextlib.contextmanager
def looking(watcher: W) -> Iterator[W]:
    """Makes somebody look for the length of a with-block."""
    with _CONTEXT(watcher):
        yield watcher
    if isinstance(watcher, Taps):
        # The cache of jit keeps the context; the tracers must not live on in it.
        watcher.sinks, watcher.inverse_scale = None, 1.0


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
    if not isinstance(taps, Taps):
        return x

    def watch(path: Sequence[Any], leaf: Any) -> Any:
        is_floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not is_floating or not isinstance(leaf, jax.Array):
            return leaf
        return taps.pass_through(leaf, name + jax.tree_util.keystr(tuple(path)))

    return jax.tree_util.tree_map_with_path(watch, x)


def _varying_like(value: Any, x: Any) -> Any:
    """A value that varies over the devices that an array varies over, whose cotangents then add up."""
    missing = varying(jax.typeof(x)) - varying(jax.typeof(value))
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
