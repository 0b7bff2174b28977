"""Makes frozen dataclasses pytrees, in which numbers are leaves and configuration is part of the treedef.

`jax.tree_util.register_dataclass` rebuilds an object through `__init__`, where validation meets
tracers, `object()` and `PartitionSpec`s (jmp and jamp cannot be `lower()`-ed for that reason). Here a
rebuilt object never runs `__init__`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.serialization import register_with_flax

T = TypeVar("T")

_STATIC, _MADE_FROM = "jmp_policy_static", "jmp_policy_made_from"


def static(**kwargs: Any) -> Any:
    """Declares a dataclass field as part of the treedef: hashable configuration, never traced."""
    return dataclasses.field(metadata={_STATIC: True}, **kwargs)


def made_from(argument: str) -> Any:
    """Declares a leaf that `__init__` makes from an argument which is no field itself."""
    return dataclasses.field(metadata={_MADE_FROM: argument})


def replace(obj: T, **changes: Any) -> T:
    """A copy with some fields changed, as `dataclasses.replace` does, but without running `__init__`.

    Nothing is validated or converted again.
    """
    new = object.__new__(type(obj))
    new.__dict__.update(obj.__dict__)
    new.__dict__.update(changes)
    return new


def set_fields(obj: Any, **fields: Any) -> None:
    """Sets fields of a frozen dataclass, for its `__init__`."""
    for name, value in fields.items():
        object.__setattr__(obj, name, value)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static, made_from))
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass and a pytree, and registers it with `flax.serialization`.

    Fields are leaves unless declared with `static()`. A class that defines `__init__` sets its fields with
    `set_fields`, and may raise an error of its own for a name that it does not take, in
    `refuse_argument(name)`.
    """
    own_init = cls.__dict__.get("__init__")
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)  # pyright: ignore
    if own_init is not None:
        cls.__init__ = _accepting_fields(own_init, cls)  # type: ignore[method-assign]
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    config = tuple(f.name for f in fields if f.metadata.get(_STATIC))
    leaves = tuple(f.name for f in fields if f.name not in config)
    keys = tuple(map(jax.tree_util.GetAttrKey, leaves))

    def flatten_with_keys(obj: Any) -> Any:
        values, settings = flatten(obj)
        return tuple(zip(keys, values, strict=True)), settings

    def flatten(obj: Any) -> Any:
        value = functools.partial(getattr, obj)
        return tuple(map(value, leaves)), tuple(map(value, config))

    def unflatten(aux: tuple[Any, ...], children: Any) -> T:
        obj = object.__new__(cls)
        obj.__dict__.update(zip(config, aux, strict=True))
        obj.__dict__.update(zip(leaves, children, strict=True))
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    register_with_flax(cls, leaves, replace)
    cls.__repr__ = _repr  # type: ignore[method-assign]
    return cls


def _accepting_fields(init: Callable[..., None], cls: Any) -> Callable[..., None]:
    """An `__init__` that takes fields which are none of its arguments, by name, as they are to be.

    `dataclasses.replace` passes every field: a counter that starts at zero otherwise keeps its value.
    """
    arguments = inspect.signature(init).parameters
    refuses = hasattr(cls, "refuse_argument")
    others = {f.name: f.metadata.get(_MADE_FROM) for f in dataclasses.fields(cls) if f.name not in arguments}

    @functools.wraps(init)
    def accepting(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in others if name in kwargs}
        if refuses and (unknown := kwargs.keys() - arguments.keys()):
            type(self).refuse_argument(next(name for name in kwargs if name in unknown))
        init(self, *args, **kwargs)
        for name, value in given.items():
            if others[name] in kwargs:
                continue
            if isinstance(value, bool | int | float):
                value = jnp.asarray(value, getattr(self, name).dtype)
            set_fields(self, **{name: value})

    return accepting


def _repr(obj: Any) -> str:
    """Shows an object as `DynamicLossScale(loss_scale=65536.0, ...)`: with values where known, else types."""
    inside = ", ".join(f"{f.name}={_show(getattr(obj, f.name))}" for f in dataclasses.fields(obj))
    return f"{type(obj).__name__}({inside})"


def _show(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return str(jax.typeof(value))
    if isinstance(value, jax.Array | np.ndarray):
        if isinstance(value, jax.Array) and value.is_deleted():
            return f"<deleted {value.dtype}[]>"
        if value.ndim == 0 and getattr(value, "is_fully_addressable", True):
            return repr(value.item())
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)
