"""Turns the function that a report is about, which may take NNX modules, into a function of arrays only."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.classes import is_instance_of
from jmp_policy._src.core.dtypes import is_floating, promote_dtype
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.ir import is_array, split_arrays
from jmp_policy._src.loss_scaling.float8_state import is_float8_state
from jmp_policy._src.loss_scaling.float16_loss import first_cotangent
from jmp_policy._src.loss_scaling.loss_scale import LossScale, split_loss
from jmp_policy._src.loss_scaling.scale_types import StaticLossScale
from jmp_policy._src.loss_scaling.state import find_loss_scale
from jmp_policy._src.policy.frameworks import imported_frameworks


class Argument(NamedTuple):
    """Description of one array among the arguments.

    Args:
      path: the argument's name and the path within it: "params/Dense_0/kernel".
      position: the argument that it is part of: a position, or the name of a keyword.
      trainable: whether it is a floating array, and, in NNX models, belongs to a Param; not what
        float8 layers keep of their amax.
      in_module: whether an NNX module holds it.
    """

    path: str
    position: int | str
    trainable: bool
    in_module: bool = False


class Function(NamedTuple):
    """Function of arrays only, with the arrays to call it with.

    Args:
      call: takes a list like `arrays`, and returns the result; for functions of NNX modules, the pair of the
        result and the modules' state after the call.
      arrays: the arrays among the arguments; may be `ShapeDtypeStruct`s.
      arguments: description of each of them.
      name: name of the function, for messages.
      has_state: whether `call` returns a pair, for NNX modules: the result, and their state by its paths.
      args: the positional arguments; where the function is itself an NNX module, that module first.
    """

    call: Callable[[Sequence[Any]], Any]
    arrays: list[Any]
    arguments: list[Argument]
    name: str
    has_state: bool
    args: tuple[Any, ...] = ()

    def trained(self) -> list[int]:
        """Which of the arrays are parameters: the trainable ones of the first argument."""
        return [i for i, a in enumerate(self.arguments) if a.position == 0 and a.trainable]

    def result(self, arrays: Sequence[Any]) -> Any:
        """The function's result, without the state of modules."""
        out = self.call(arrays)
        return out[0] if self.has_state else out

    def of_params(self, params: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """The function's result for other parameters than those among the arrays."""
        return self.result(replaced(arrays, self.trained(), params))

    def jaxpr(self) -> Any:
        """Traces the function to its closed jaxpr; nothing is run."""
        return jax.make_jaxpr(self.call)(self.arrays)

    def returns_scalar(self) -> bool:
        """Whether the function's result is one number, as a loss is."""
        answers: list[bool] = []

        def run(arrays: Sequence[Any]) -> None:
            # Here: the result itself would outlive its trace.
            result = self.result(arrays)
            answers.append(jax.tree.structure(result) == jax.tree.structure(0) and jnp.shape(result) == ())

        jax.eval_shape(run, self.arrays)
        return answers[0]

    def trained_by(self, use: str) -> list[int]:
        """As `trained`; raises ValueError if there is none, with the name of the report."""
        trained = self.trained()
        if not trained:
            raise ValueError(f"{use} found no floating arrays in the parameters of {self.name}.")
        return trained

    def value_and_gradients(
        self, use: str, loss_scale: Any, has_aux: bool
    ) -> tuple[Callable[..., Any], list[str]]:
        """A function to the loss, the loss times its scale, and the latter's gradients; and their names."""
        trained = self.trained_by(use)

        def program(arrays: Sequence[Any]) -> Any:
            def scaled(params: Sequence[Any]) -> Any:
                loss, _ = split_loss(self.of_params(params, arrays), has_aux)
                loss = jnp.asarray(loss)
                seed = jnp.asarray(first_cotangent(loss.dtype, loss_scale), jnp.float32)
                product = loss.astype(promote_dtype(loss.dtype)) * seed
                return product, loss

            (product, loss), grads = jax.value_and_grad(scaled, has_aux=True)([arrays[i] for i in trained])
            return [loss, product, *grads]

        return program, ["the loss", "the scaled loss", *(self.arguments[i].path for i in trained)]

    def with_gradients(self) -> "Function":
        """The function, a loss or one to a loss and anything, to its value, its gradients and its results."""
        trained = self.trained()

        def value_and_gradients(arrays: Sequence[Any]) -> Any:
            def loss(params: Sequence[Any]) -> Any:
                out = self.call(replaced(arrays, trained, params))
                result = out[0] if self.has_state else out
                value = result[0] if isinstance(result, tuple) else result
                if getattr(value, "shape", None) != ():
                    raise TypeError(
                        f"audit(..., grad=True) needs a loss, a function that returns a scalar (or a pair of "
                        f"scalar and anything); {self.name} returns {jax.tree.map(jnp.shape, result)}."
                    )
                return value, out

            return jax.value_and_grad(loss, has_aux=True)([arrays[i] for i in trained])

        return self._replace(call=value_and_gradients, has_state=False)

    def named_results(self) -> tuple[Callable[..., Any], list[str]]:
        """A function to the arrays among all results, and a list that holds their names once it ran."""
        names: list[str] = []

        def program(arrays: Sequence[Any]) -> list[Any]:
            out, state = self.call(arrays) if self.has_state else (self.call(arrays), {})
            paths = jax.tree_util.tree_leaves_with_path({"result": out} | state)
            kept = [(path, leaf) for path, leaf in paths if is_array(leaf)]
            names[:] = ["/".join(map(_key, path)) for path, _ in kept]
            return [leaf for _, leaf in kept]

        return program, names


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
        if any(callable(arg) for arg in args):
            hint = " Give the function first, and its arguments after it."
        given = f"a {type(fn).__name__}" if isinstance(fn, dict | list | tuple) else f"{fn!r:.200}"
        raise TypeError(f"{use} takes a function and its arguments, got {given}.{hint}")
    names = _argument_names(fn, args)
    fn = _naming_modules(fn)
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


def to_run(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], use: str) -> Function:
    """As `as_function`, of what runs on the host; raises TypeError for anything but arrays to run it with."""
    function = as_function(fn, args, kwargs, use)
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in function.arrays):
        raise TypeError(f"{use} runs the function: it needs arrays, not jax.ShapeDtypeStructs.")
    if any(isinstance(array, jax.core.Tracer) for array in function.arrays):
        raise TypeError(f"{use} runs on the host: call it outside of jax.jit, jax.grad and jax.vmap.")
    return function


def replaced(items: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """A list of items with new ones in some places."""
    whole = list(items)
    for i, item in zip(places, new, strict=True):
        whole[i] = item
    return whole


def _call_module(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _naming_modules(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in which modules that it makes of their arrays (`nnx.merge`) name scopes."""

    @functools.wraps(fn)
    def naming(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for framework in imported_frameworks():
                stack.enter_context(framework.naming())
            return fn(*args, **kwargs)

    return naming


def _argument_names(fn: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    names = []
    with contextlib.suppress(TypeError, ValueError):
        bound = inspect.signature(fn).bind_partial(*args)
        kinds = {name: bound.signature.parameters[name].kind for name in bound.arguments}
        names = [name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_POSITIONAL]
    return [*names, *map(str, range(len(names), len(args)))]


def _argument(path: Sequence[Any], names: list[str], leaf: Any) -> Argument:
    (which, place, *rest) = path
    position = place.idx if which.idx == 0 else place.key
    name = names[position] if which.idx == 0 else str(position)
    trainable = is_floating(leaf.dtype) and not is_float8_state(rest)
    return Argument("/".join([name, *map(_key, rest)]), position, trainable)


def _key(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _of_modules(
    fn: Callable[..., Any], split: Any, args: Sequence[Any], names: list[str], name: str
) -> Function:
    others = [i for i, leaf in enumerate(split.others) if is_array(leaf)]
    values, structure = jax.tree.flatten(split.state)
    known = [Argument(path, place, trains, True) for path, place, trains in split.describe(names)]
    paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(split.structure, range(len(split.others))))
    arguments = known + [_argument(path, names, split.others[i]) for path, i in paths if i in others]

    def call(arrays: Sequence[Any]) -> Any:
        state = jax.tree.unflatten(structure, arrays[: len(values)])
        return split.call(fn, state, replaced(split.others, others, arrays[len(values) :]), names)

    arrays = [*values, *(split.others[i] for i in others)]
    return Function(call, arrays, arguments, name, has_state=True, args=tuple(args))


def donated_arguments(jaxpr: Any) -> tuple[int, ...]:
    """Which arguments of a program a jitted function in it may overwrite."""
    opened = compat.open_jaxpr(jaxpr)
    flags = ((eqn.invars, eqn.params.get("donated_invars", ())) for eqn in opened.eqns)
    given = {var for variables, donated in flags for var in itertools.compress(variables, donated)}
    return tuple(i for i, var in enumerate(opened.invars) if var in given)


def as_loss_scale(scale: Any) -> LossScale:
    """Converts a number to a loss scale, and finds the loss scale in an optimizer state.

    Args:
      scale: a loss scale, a number, or an optimizer state that holds a loss scale.

    Raises:
      ValueError: when an optimizer state holds none, or several.
    """
    is_number = isinstance(scale, int | float | np.number) or getattr(scale, "ndim", None) == 0
    return StaticLossScale(scale) if is_number else find_loss_scale(scale)
