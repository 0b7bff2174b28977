"""Names the types of the values that functions of the package take and return."""

from typing import Any, Protocol, TypeAlias

import jax
import numpy as np


class SupportsDType(Protocol):
    """Protocol of what has a dtype, such as `jnp.float16`."""

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype."""
        ...


#: Anything `jnp.dtype` accepts: "float16", jnp.float16, np.dtype("float16"). It is `jax.typing.DTypeLike`
#: written out: pyright's report of a package's types does not follow imports into other packages' sources.
DTypeLike: TypeAlias = str | type[Any] | np.dtype[Any] | SupportsDType

#: What becomes one array: `jax.typing.ArrayLike`, written out for the same reason.
ArrayLike: TypeAlias = jax.Array | np.ndarray[Any, Any] | np.generic | bool | int | float | complex

#: A pytree whose leaves may be anything; only floating arrays are ever changed.
PyTree: TypeAlias = Any

#: Where a module or a leaf lives, outermost name first: ("encoder", "layer_0", "attention").
Path: TypeAlias = tuple[str, ...]
