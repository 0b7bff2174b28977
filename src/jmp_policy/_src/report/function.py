"""Turns the function that a report is about, which may take NNX modules, into a function of arrays only."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_policy._src.core.imported import is_instance_of
from jmp_policy._src.jaxpr.flatten import is_array, split_arrays
from jmp_policy._src.loss_scaling.float8_state import is_float8_state
from jmp_policy._src.policy.frameworks import imported_frameworks


class Argument(NamedTuple):
    """Description of one array among the arguments.

    Args:
      path: the argument's name and the path within it: "params/Dense_0/kernel".
      position: the argument that it is part of: a position, or the name of a keyword.
      trainable: whether it is a floating array, and, in NNX models, belongs to a Param; not what
        float8 layers keep of their amax.
    """

    path: str
    position: int | str
    trainable: bool


class Function(NamedTuple):
    """Function of arrays only, with the arrays to call it with.

    Args:
      call: takes a list like `arrays`, and returns the result; for functions of NNX modules, the pair of the
        result and the modules' state after the call.
      arrays: the arrays among the arguments; may be `ShapeDtypeStruct`s.
      arguments: description of each of them.
      name: name of the function, for messages.
      has_state: whether `call` returns a pair, as for NNX modules.
      args: the positional arguments; where the function is itself an NNX module, that module first.
    """

    call: Callable[[Sequence[Any]], Any]
    arrays: list[Any]
    arguments: list[Argument]
    name: str
    has_state: bool
    args: tuple[Any, ...] = ()

    def trained(self) -> list[int]:
        """Returns which of the arrays are parameters: the trainable ones of the first argument."""
        return [i for i, a in enumerate(self.arguments) if a.position == 0 and a.trainable]

    def result(self, arrays: Sequence[Any]) -> Any:
        """Returns the function's result, without the state of modules."""
        out = self.call(arrays)
        return out[0] if self.has_state else out

    def jaxpr(self) -> Any:
        """Traces the function to its closed jaxpr; nothing is run."""
        return jax.make_jaxpr(self.call)(self.arrays)


def as_function(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], use: str) -> Function:
    """Turns a function and its arguments into a function of arrays; other arguments are static.

    Args:
      fn: any function that `jax.jit` could trace, or one of NNX modules; an NNX module itself.
      args, kwargs: its arguments; `jax.ShapeDtypeStruct`s will do where nothing is run.
      use: the name of the report, for messages.

    Raises:
      TypeError: when `fn` is not a function.
    """
    if is_instance_of(fn, "flax.linen", "Module"):
        raise TypeError(
            f"{use} takes a function, and a Linen module keeps no parameters: give it `model.apply` and the "
            "variables, or a loss function."
        )
    name = getattr(fn, "__name__", type(fn).__name__)
    if is_instance_of(fn, "flax.nnx", "Module"):
        fn, args = _call_module, (fn, *args)
    if isinstance(fn, type) or not callable(fn):
        hint = " Did you call it already? Give the function, and its arguments after it."
        raise TypeError(f"{use} takes a function and its arguments, got {fn!r:.200}.{hint}")
    names = _argument_names(fn, args)
    for framework in imported_frameworks():
        split = framework.split(args, kwargs)
        if split is not None:
            return _of_modules(fn, split, args, names, name)
    tree = (tuple(args), kwargs)
    given = split_arrays(tree)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    arguments = [_argument(paths[i], names, given.leaves[i]) for i in given.places]

    def call(arrays: Sequence[Any]) -> Any:
        new_args, new_kwargs = given.merged(arrays)
        return fn(*new_args, **new_kwargs)

    return Function(call, given.arrays, arguments, name, has_state=False, args=tuple(args))


def replaced(items: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Returns a list of items with new ones in some places."""
    whole = list(items)
    for i, item in zip(places, new, strict=True):
        whole[i] = item
    return whole


def is_floating(array: Any) -> bool:
    """Returns whether an array, or the type of one, is of a real floating dtype."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _call_module(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _argument_names(fn: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    try:
        names = list(inspect.signature(fn).bind_partial(*args).arguments)
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        names, parameters = [], {}
    if names and parameters[names[-1]].kind is inspect.Parameter.VAR_POSITIONAL:
        names.pop()
    return [*names, *(str(i) for i in range(len(names), len(args)))]


def _argument(path: Sequence[Any], names: list[str], leaf: Any) -> Argument:
    (which, place, *rest) = path
    position = place.idx if which.idx == 0 else place.key
    name = names[position] if which.idx == 0 else str(position)
    trainable = is_floating(leaf) and not is_float8_state(rest)
    return Argument("/".join([name, *map(_key, rest)]), position, trainable)


def _key(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _of_modules(
    fn: Callable[..., Any], split: Any, args: Sequence[Any], names: list[str], name: str
) -> Function:
    others = [i for i, leaf in enumerate(split.others) if is_array(leaf)]
    values, structure = jax.tree.flatten(split.state)
    known = [Argument(path, place, kind) for path, place, kind in split.describe(names)]
    paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(split.structure, range(len(split.others))))
    arguments = known + [_argument(path, names, split.others[i]) for path, i in paths if i in others]

    def call(arrays: Sequence[Any]) -> Any:
        state = jax.tree.unflatten(structure, arrays[: len(values)])
        return split.call(fn, state, replaced(split.others, others, arrays[len(values) :]))

    arrays = [*values, *(split.others[i] for i in others)]
    return Function(call, arrays, arguments, name, has_state=True, args=tuple(args))
