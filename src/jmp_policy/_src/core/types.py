"""Names the types of the values that functions of the package take and return."""

from typing import Any, TypeAlias

#: Anything `jnp.dtype` accepts: "float16", jnp.float16, np.dtype("float16").
DTypeLike: TypeAlias = Any

#: A pytree whose leaves may be anything; only floating arrays are ever changed.
PyTree: TypeAlias = Any

#: Where a module or a leaf lives, outermost name first: ("encoder", "layer_0", "attention").
Path: TypeAlias = tuple[str, ...]
