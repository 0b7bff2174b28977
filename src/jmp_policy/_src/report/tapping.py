"""Defines taps: identities on activations that count magnitudes, forward and backward, for a watcher.

A tap has no callbacks and no side effects: its counts leave the backward pass as the cotangent of an
additional argument of zeros, its sink::

    def tap(x, sink): return x                                  # forward; keeps count(x) as a residual
    def backward(counts, g): return g, [counts, count(g)]       # the cotangents of x and of the sink
    counts = jax.grad(loss, argnums=1)(params, sinks)

So it works under jit, in scans and under remat, and counts add up over the trips of a loop. Without a watcher
a tap returns the very value it was given.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.jaxpr.compat import varying
from jmp_policy._src.policy.frameworks import Watcher, imported_frameworks, looking

T = TypeVar("T")


def plain_names(scopes: Iterable[str]) -> tuple[str, ...]:
    """Names of modules from those of scopes, in which methods other than `__call__` are named too."""
    return tuple(part.partition(".")[0] for scope in scopes for part in scope.split("/"))


class Taps(Watcher):
    """Watcher that counts the values of all taps. Compared by identity, so that each use traces anew.

    Args:
      count: function from an array and 1 / loss scale to a vector of counts.
      sinks: zeros by name of tap, of shape (2, counts); None to only collect the names.
      inverse_scale: 1 / loss scale of the backward pass.

    Attributes:
      met: without sinks, the names of the taps on values that are differentiated.
    """

    def __init__(
        self, count: Callable[[Any, Any], Any], sinks: dict[str, Any] | None = None, inverse_scale: Any = 1.0
    ):
        self.count = count
        self.sinks = sinks
        self.inverse_scale = inverse_scale
        self.met: dict[str, None] = {}

    def returned(self, name: str, module: Any, args: Any, kwargs: Any, out: T) -> T:
        """Taps the outputs of a module, and returns them; of shape () is a loss, whose cotangent is 1."""
        return self.tapped(out, name, least_axes=1)

    def tapped(self, x: T, name: str, least_axes: int = 0) -> T:
        """Taps the floating arrays of a value; where there are several, the path of each follows its name."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(x)
        floating = [
            isinstance(leaf, jax.Array) and is_floating(leaf.dtype) and leaf.ndim >= least_axes
            for _, leaf in leaves
        ]
        several = sum(floating) > 1
        watched = [
            self._array(leaf, name + jax.tree_util.keystr(path) if several else name) if taken else leaf
            for taken, (path, leaf) in zip(floating, leaves, strict=True)
        ]
        return treedef.unflatten(watched)

    def _array(self, x: Any, name: str) -> Any:
        if self.sinks is None:
            return _noted(functools.partial(self.met.setdefault, name), x)
        if name not in self.sinks:
            return x
        inverse = varying_like(jnp.asarray(self.inverse_scale, jnp.float32), x)
        return _watched(self.count, x, varying_like(self.sinks[name], x), inverse)

    def done(self) -> None:
        """Forgets the arrays of a trace: the cache of jit keeps the watcher, and is not to keep them."""
        self.sinks, self.inverse_scale = None, 1.0


@contextlib.contextmanager
def watching_modules(watcher: Watcher) -> Iterator[None]:
    """Shows to a watcher, inside a with-block, what `tap` names and what modules of Flax return.

    Linen modules show it here; NNX modules wherever `flax.nnx.states.named` gave them names.
    """
    with contextlib.ExitStack() as stack:
        for framework in imported_frameworks():
            stack.enter_context(framework.tapped())
        stack.enter_context(looking(watcher))
        yield


class Call(NamedTuple):
    """Call of a module's method.

    Args:
      name: name of the model's class, and the attributes that lead to the module.
      module: the module; its values belong to a trace that has ended.
      receives, returns: dtypes of the floating arrays among its inputs and outputs.
    """

    name: str
    module: Any
    receives: tuple[str, ...]
    returns: tuple[str, ...]


class Calls(Watcher):
    """Watcher that records every call of a module.

    Args:
      note: function from a module, while it is called, to what else is recorded.
    """

    def __init__(self, note: Callable[[Any], Any] = lambda module: None):
        self._note = note
        self.calls: list[tuple[Call, Any]] = []

    def returned(self, name: str, module: Any, args: Any, kwargs: Any, out: T) -> T:
        """Records a call, and returns its outputs unchanged."""
        call = Call(name, module, _dtypes((args, kwargs)), _dtypes(out))
        self.calls.append((call, self._note(module)))
        return out

    def done(self) -> None:
        """Forgets the modules of a trace: they hold its tracers."""
        self.calls = [(call._replace(module=None), note) for call, note in self.calls]


def _dtypes(tree: Any) -> tuple[str, ...]:
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and hasattr(x, "shape")]
    return tuple(dict.fromkeys(str(x.dtype) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)))


def varying_like(value: Any, x: Any) -> Any:
    """Types a value as varying over the devices that `x` varies over, so that its cotangents add up."""
    missing = varying(jax.typeof(x)) - varying(jax.typeof(value))
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _noted(note: Callable[[], Any], x: Any) -> Any:
    """The value; calls a function where it is differentiated."""
    return x


def _note(note: Callable[[], Any], primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
        note()
    return primals[0], tangents[0]


_noted.defjvp(_note, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(count: Any, x: Any, sink: Any, inverse_scale: Any) -> Any:
    return x


def _backward(count: Any, residuals: Any, cotangent: Any) -> Any:
    counts, inverse_scale = residuals
    seen = jnp.stack([counts, count(cotangent, inverse_scale)])
    return cotangent, seen, jnp.zeros_like(inverse_scale)


_watched.defvjp(lambda count, x, sink, inverse: (x, (count(x, 1.0), inverse)), _backward)
