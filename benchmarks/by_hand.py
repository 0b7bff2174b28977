"""A model as its author would write it for half precision: `dtype=` in every layer.

The models of the zoo have no precision code; here they get what a careful author adds by hand. Flax's layers
take `dtype=float16` (their attention then has its softmax in half, too, which costs least), raw parameters
are cast where they are read, and the inputs where they come in.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ByHand:
    """A Linen module in a half type.

    Args:
      module: without dtypes.
      dtype: in which its layers compute.
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
