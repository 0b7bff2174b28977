"""Every use of Flax's private parts.

Private is what Flax documents nowhere: attributes with a leading underscore, marks that it puts on methods,
the functions its own transforms are made of. Each function says what it uses, and which public way was
missing. All of it was read in Flax 0.12.8 and 0.12.12. What could change without an error is checked once.

NNX is imported where it is needed: `import flax` alone does not, and a program of Linen modules should not.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
from flax.core import lift
from flax.linen import transforms
from jax import lax

from jmp_policy._src.jaxpr import compat

#: Versions of Flax in which the private parts were read.
READ_IN = "0.12.8 and 0.12.12"


def _require(found: bool, what: str) -> None:
    compat.require(found, what, flax, READ_IN)


def over_variables(
    transform: Callable[[Callable[..., Any]], Callable[..., Any]],
    method: Callable[..., Any],
    module: nn.Module,
    *args: Any,
) -> Any:
    """Runs a method of a Linen module inside a transformation of functions of arrays, as `nn.jit` does.

    Private: `flax.core.lift.pack` and `flax.linen.transforms.lift_direct_transform`, of which Flax makes its
    own transforms. The public ones (`nn.vjp`, `nn.custom_vjp`) take no transformation of the user's.

    Args:
      transform: takes a function of variables, random keys and arguments, and gives another one.
      method: takes the module and `args`.
      module: it must be bound.
      args: pytrees.

    Returns:
      What the method gives; what it writes into the module's variables is kept.
    """

    def lifted(fn: Callable[..., Any], scopes: Any, *given: Any) -> Any:
        def inner(scope_of: Any, repacked: Any, variables: Any, rngs: Any, *given: Any) -> Any:
            def pure(variables: Any, rngs: Any, given: Any) -> Any:
                scopes = scope_of(variables, rngs)
                return fn(scopes, *given), repacked(scopes)

            return transform(pure)(variables, rngs, given)

        return lift.pack(inner, (True,), (True,), (True,))(scopes, *given)

    return transforms.lift_direct_transform(lifted, (method,), module, *args)


def is_compact(method: Callable[..., Any]) -> bool:
    """Returns whether a method is `nn.compact`.

    Private: the attribute `compact` that the decorator sets. Flax has no public way to ask for it.
    """
    _require(hasattr(nn.compact(lambda module: None), "compact"), "`compact` from methods under nn.compact")
    return hasattr(method, "compact")


def managed_methods(cls: type[nn.Module]) -> set[str]:
    """Returns the names of the methods of a Linen class that Flax shows to interceptors.

    Private: the attribute `method_handler_wrapped` that Flax sets. It has no public way to list its methods.
    """
    found = hasattr(nn.Dense.__call__, "method_handler_wrapped")
    _require(found, "which methods interceptors see from `method_handler_wrapped`")
    own = [c for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    return {name for c in own for name, x in vars(c).items() if hasattr(x, "method_handler_wrapped")}


def copied_fields(cls: type[nn.Module]) -> dict[str, Any]:
    """Returns the attributes that give a subclass of a Linen class the same dataclass fields, as its own.

    Private: `__dataclass_fields__`. Flax takes fields out of this dictionary of each base class while it
    makes a subclass and puts them back afterwards, so that two classes must not share one. There is a public
    way to read them, `dataclasses.fields`, and none to set them. Without the attribute this fails.
    """
    return {"__dataclass_fields__": dict(vars(cls)["__dataclass_fields__"])}


def register_node_class(cls: Any) -> None:
    """Registers a subclass of an NNX class with Flax and JAX, as Flax's hook for subclasses does.

    Private: the class attributes below, which that hook hands to the public registries. The hook itself
    (`nnx.Pytree.__init_subclass__`) calls those of the user's classes as well.
    """
    from flax import nnx

    graph = ("flatten", "set_key", "pop_key", "create_empty", "clear", "init")
    found: dict[str, Any] = {name: getattr(cls, f"_graph_node_{name}", None) for name in graph}
    tree = ("_pytree__flatten_with_paths", "_pytree__unflatten", "_pytree__flatten")
    known = all(found.values()) and all(hasattr(cls, name) for name in ("_pytree__is_pytree", *tree))
    _require(known, "how NNX objects are taken apart from `_graph_node_*`, `_pytree__is_pytree`")
    nnx.graphlib.register_graph_node_type(type=cls, **found)
    if cls._pytree__is_pytree:
        jax.tree_util.register_pytree_with_keys(cls, *(getattr(cls, name) for name in tree))


def is_bookkeeping(name: str) -> bool:
    """Returns whether an attribute of an NNX object is Flax's own, and holds nothing of the user's.

    Private: names that begin with `_pytree__`. `nnx.iter_graph` leaves them out, but walks the whole graph.
    There is no check: taken for the user's, such an attribute is searched for Variables, and has none.
    """
    return name.startswith("_pytree__")


class VariableView:
    """What views of Variables have in common, and are told by.

    A view is a Variable without storage: what Flax keeps in a Variable's slots is that of another one.
    """

    __slots__ = ()
    _jmp_policy_origin: Any

    def __init_subclass__(cls) -> None:
        # Flax's hook without that of the author of the Variable's class, which is not for views.
        from flax import nnx

        nnx.Variable.__init_subclass__.__func__(cls)  # type: ignore[attr-defined]

    @property
    def _raw_value(self) -> Any:
        return self._jmp_policy_origin.get_raw_value()

    @_raw_value.setter
    def _raw_value(self, value: Any) -> None:
        self._jmp_policy_origin.set_raw_value(value)

    @property
    def _var_metadata(self) -> dict[str, Any]:
        # The very dictionary, since Flax writes into it; a hijax Variable's is a copy in any case.
        origin = self._jmp_policy_origin
        metadata = origin.get_metadata()
        return {**metadata, "hijax": False} if metadata.get("hijax") else origin._var_metadata

    @_var_metadata.setter
    def _var_metadata(self, metadata: dict[str, Any]) -> None:
        self._jmp_policy_origin._var_metadata = metadata

    @property
    def _trace_state(self) -> Any:
        # A hijax Variable can be written to in every trace, and has no state of one.
        from flax.nnx import tracers

        origin = self._jmp_policy_origin
        return tracers.TraceState() if origin.get_metadata().get("hijax") else origin._trace_state


def view_class(base: Any, methods: dict[str, Any]) -> Any:
    """Returns a subclass of a Variable's class, of the same name, whose objects are views.

    Private: the slots `_raw_value`, `_var_metadata` and `_trace_state`, which Flax's own code reads past the
    public `get_raw_value` and `get_metadata`, and `_new`, by which it makes Variables when it rebuilds trees.
    NNX has no public way to let two Variables share what they store.

    Args:
      base: the class, as `variable.var_type` gives it.
      methods: what views do otherwise than their origins.
    """
    from flax import nnx

    slots = {"_raw_value", "_var_metadata", "_trace_state"}
    found = set(nnx.Variable.__slots__) == slots and hasattr(nnx.Variable, "_new")
    _require(found, "what a Variable stores from `_raw_value`, `_var_metadata` and `_trace_state`")

    def new(cls: Any, value: Any, metadata: dict[str, Any]) -> Any:
        return view_of(base._new(value, metadata), cls)

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__slots__": ("_jmp_policy_origin",),
        "_new": classmethod(new),
        **methods,
    }
    return types.new_class(base.__name__, (VariableView, base), {}, lambda ns: ns.update(namespace))


def view_of(variable: Any, cls: Any) -> Any:
    """Returns a view of a Variable, of a class that `view_class` has made."""
    view = object.__new__(cls)
    object.__setattr__(view, "_jmp_policy_origin", variable)
    return view


def origin_of(variable: Any) -> Any:
    """Returns the Variable that a view stores in; any other Variable itself."""
    return variable._jmp_policy_origin if isinstance(variable, VariableView) else variable


def is_traced_by_loop(stops: Callable[[types.FrameType], bool]) -> bool:
    """Returns whether the code that is running is the body of a `lax.scan`, `lax.while_loop` or `fori_loop`.

    All transforms of JAX look alike from inside, so this looks for a frame in the very files that define the
    loops. JAX has no public way to ask which transform traces a function.

    Args:
      stops: whether the search for loops ends at a frame; it goes from the innermost frame outwards.
    """
    what = "whether a loop traces a function from the frames of its callers"
    return _is_called_from(compat.checked(_probe_loops, what), stops)


def _is_called_from(files: frozenset[str], stops: Callable[[types.FrameType], bool]) -> bool:
    frame = inspect.currentframe()
    while frame is not None and not stops(frame):
        if frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False


def _probe_loops() -> frozenset[str] | None:
    """Finds the files that define JAX's loops, as whole paths: a user's may be called loops.py too."""
    loops = (lax.scan, lax.while_loop, lax.fori_loop)
    files = frozenset(inspect.unwrap(loop).__code__.co_filename for loop in loops)
    found = []

    def body(x: Any) -> Any:
        found.append(_is_called_from(files, lambda frame: frame.f_code is _probe_loops.__code__))
        return x

    jax.make_jaxpr(lambda x: lax.scan(lambda x, _: (body(x), None), x, length=2)[0])(1.0)
    jax.make_jaxpr(lambda x: lax.while_loop(lambda x: x < 1.0, body, x))(1.0)
    jax.make_jaxpr(lambda x: lax.fori_loop(0, 2, lambda _, x: body(x), x))(1.0)
    of_loops, found = found, []
    jax.make_jaxpr(jax.jit(body))(1.0)
    return files if all(of_loops) and not any(found) and len(of_loops) >= 3 else None
