"""What `wrap` says of models that it cannot put under a policy, and of what it leaves without one."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jmp_policy._src.core.classes import is_instance_of
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.flax.nnx import graph_nodes
from jmp_policy._src.flax.nnx.graph_nodes import Path, name_of, own_methods
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import path_text


def not_a_module(given: Any) -> TypeError:
    """For what is no NNX module."""
    if isinstance(given, type) and issubclass(given, nnx.Module):
        call = f"wrap({given.__name__}(..., rngs=rngs), policy)"
        return TypeError(f"wrap takes a module, not its class: {call}.")
    if is_instance_of(given, "flax.linen", "Module"):
        return TypeError(
            f"{type(given).__name__} is a Linen module, and NNX was expected: use jmp_policy.wrap or "
            "jmp_policy.linen.wrap, or make it an NNX module with flax.nnx.bridge.ToNNX."
        )
    hints = (
        (nnx.GraphDef, " Merge it first: nnx.merge(graphdef, state)."),
        (nnx.Optimizer, " Wrap the model, and make the optimizer from the wrapped one."),
        (nnx.Variable, " Wrap the module that holds it."),
    )
    hint = next((text for cls, text in hints if isinstance(given, cls)), "")
    return TypeError(f"nnx.wrap takes a flax.nnx.Module, got {type(given).__name__}.{hint}")


def makes_modules_when_called(module: Any, path: Path) -> TypeError:
    """For a module whose submodules cannot be reached."""
    return TypeError(
        f"{name_of(module)} at {path_text(path)!r} is a flax.nnx.bridge.Module, which makes its "
        "submodules when it is called, where wrap cannot reach them. Write it as an nnx.Module."
    )


def unknown_method(name: str, methods: Sequence[str], classes: Iterable[type]) -> ValueError:
    """For a name among `methods` that no module of the model defines."""
    known = {method for cls in classes for method in own_methods(cls) if not method.startswith("_")}
    hint = did_you_mean(name, sorted(known))
    return ValueError(f"methods={methods!r}: no module of this model defines {name!r}.{hint}")


def too_many_paths(most: int) -> ValueError:
    """For modules that hold each other in so many ways that rules cannot be resolved."""
    return ValueError(
        f"The modules of this model are shared so often that they are at more than {most} "
        "paths: rules cannot be resolved for all of them. Use one policy, or share less."
    )


def two_policies(module: Any, paths: tuple[Path, Path], policies: tuple[Policy, Policy]) -> ValueError:
    """For a module that the rules give another policy at its second path."""
    return ValueError(
        f"{name_of(module)} is shared: it is at {path_text(paths[0])!r}, where the rules "
        f"give it {str(policies[0])!r}, and at {path_text(paths[1])!r}, where they give "
        f"it {str(policies[1])!r}. Add a rule that gives both places the same policy."
    )


def two_param_dtypes(paths: tuple[Path, Path], dtypes: tuple[np.dtype, np.dtype]) -> ValueError:
    """For a parameter that the rules want stored otherwise at its second path."""
    return ValueError(
        f"The parameter {path_text(paths[0])!r} is shared with {path_text(paths[1])!r}, and the rules want "
        f"it stored in {dtypes[0].name} at the first and in {dtypes[1].name} at the "
        "second place. Give both the same param dtype."
    )


def wrong_dtype(
    model: Any, path: Path, variable: nnx.Variable, precision: ModulePrecision, *, others: int
) -> ValueError:
    """For a parameter that is not stored in param dtype, and that many others."""
    stored = ", ".join(sorted(dtype.name for dtype in graph_nodes.dtypes(variable)))
    more = f" (and {others} more)" if others else ""
    return ValueError(
        f"The parameter {path_text(path)!r}{more} of {name_of(model)} is {stored}, but its "
        f"policy {str(precision.policy)!r} wants parameters in {precision.param_dtype.name}. Make the "
        f"module with param_dtype={precision.param_dtype.name}, or call jmp_policy.nnx.cast_params("
        "model, policy), which casts them in place, before wrap and before the optimizer is made."
    )


def never_cast(module: Any) -> str:
    """For a module whose parameters no governed method reads."""
    public = tuple(sorted(name for name in own_methods(type(module)) if not name.startswith("_")))
    advice = (
        f"List the methods that read them: jmp_policy.nnx.wrap(model, policy, methods={public!r})."
        if public
        else "Cast them where they are read."
    )
    return (
        f"{name_of(module)} has parameters of its own and no __call__, so that nothing casts them. {advice}"
    )


def stored_method(where: str) -> ValueError:
    """For a method or partial in an attribute that holds a module of the model."""
    return ValueError(
        f"{where} is a bound method, or a functools.partial, that holds a module of the model. NNX copies "
        "models (nnx.jit and nnx.grad do, too), and such a function stays with the module that it was made "
        "with: no policy and no eval() reaches it, and its gradients are 0. Keep the name of the method "
        "and call getattr(self, name), or call the method where it is needed."
    )


def closure(where: str) -> str:
    """For another function in an attribute that holds a module of the model."""
    return (
        f"The function {where} holds a module of the model, in its closure, its defaults or an attribute. It "
        "keeps the module without a policy: pass the module as an argument, or make the function a method."
    )
