"""What may be wrong with a loss and its scale: as they are given, in the state, in the history of gradients.

Right steps ask for nothing here: what is given is tested where it is used, and gradients that plainly come
scaled out of a backward pass are not looked at.
"""

import collections
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import calls, compat
from jmp_policy._src.jaxpr.data_flow import (
    Ancestors,
    ancestors,
    computed_from,
    ends_backward_pass,
    transposes,
)
from jmp_policy._src.jaxpr.jax_sources import directory_of
from jmp_policy._src.jaxpr.source_lines import source_line
from jmp_policy._src.loss_scaling.gradient_changes import degrees
from jmp_policy._src.loss_scaling.protocol import FromDict


def no_loss_scale(given: Any, where: str) -> TypeError:
    """Makes the error for what is no loss scale; `where` says for which loss it was given."""
    hint = ""
    if isinstance(given, type):
        hint = f" Did you mean {given.__name__}()?"
    elif isinstance(given, int | float):
        hint = f" Did you mean StaticLossScale({given})?"
    return TypeError(
        f"loss_scaled needs a loss scale{where}, such as DynamicLossScale(), StaticLossScale(1024.0) or "
        f"NoOpLossScale(); got {given!r}.{hint}"
    )


def outside(value: float, low: float, high: float) -> ValueError:
    """Makes the error for a scale beyond its bounds."""
    return ValueError(
        f"loss_scale is {value:g}, outside [{low:g}, {high:g}]. It must be a normal float32 "
        "number between min_loss_scale and max_loss_scale (set those to allow more), else gradients "
        "become 0 or inf."
    )


def no_bound(name: str, value: float, smallest: float) -> ValueError:
    """Makes the error for a floor or ceiling that no scale may have."""
    return ValueError(
        f"{name} is {value:g}; it must be a positive, finite, normal float32 number, at least "
        f"{smallest:g}: a scale of 0 or inf makes every gradient NaN."
    )


def no_loss(out: Any, has_aux: bool) -> TypeError:
    """Makes the error for what a loss function returned, if that is no loss."""
    if has_aux:
        return TypeError(
            f"With has_aux=True the loss function must return (loss, aux), got {type(out).__name__}."
        )
    return TypeError(
        f"The loss function must return one scalar, got {jax.tree.structure(out)}. To return more "
        "beside the loss, use has_aux=True."
    )


def no_loss_itself() -> TypeError:
    """Makes the error for what computes gradients in the place of a loss function."""
    return TypeError(
        "scaled_value_and_grad and accumulate_gradients take the loss function itself, and got what one of "
        "them returned. accumulate_gradients(loss_fn, n)(opt_state, params, batch) scales the loss too."
    )


def loss_and_gradients() -> TypeError:
    """Makes the error for an update with both results of `scaled_value_and_grad`."""
    return TypeError(
        "update takes gradients, and got (loss, gradients): write loss, grads = "
        "scaled_value_and_grad(loss_fn)(opt_state, params), and update(grads, opt_state, params)."
    )


def called_at_once(argnums: Any) -> TypeError:
    """Makes the error for what is no number of an argument, such as an optimizer's state."""
    return TypeError(
        f"argnums are numbers of arguments, got {type(argnums).__name__}. The optimizer's state and the "
        "parameters go to what is returned: scaled_value_and_grad(loss_fn)(opt_state, params)."
    )


def too_few(given: int, argnums: Any) -> TypeError:
    """Makes the error for a call without the argument that is to be differentiated."""
    return TypeError(
        "scaled_value_and_grad(loss_fn) is called as (opt_state, params, ...): the optimizer state, "
        f"then the arguments of loss_fn. Behind the state came {given}, too few for "
        f"argnums={argnums}."
    )


def not_one(state: str, paths: Sequence[str]) -> ValueError:
    """Makes the error for a state with no loss scale, or with several.

    Args:
      state: name of its class.
      paths: where the loss scales are.
    """
    if not paths:
        return ValueError(
            f"There is no loss scale in this {state}: wrap the optimizer with "
            "jmp_policy.loss_scaled(optimizer, DynamicLossScale()) and pass the state its init returned, as "
            "the first argument before the parameters."
        )
    places = ", ".join(path or "(the state itself)" for path in paths)
    if paths[1].startswith(f"{paths[0]}.inner_state"):
        return ValueError(
            f"loss_scaled is around the optimizer twice: there are loss scales at {places}. Remove one."
        )
    groups = "Put one loss_scaled around the whole optimizer, whose groups share it. Or name"
    return ValueError(
        f"There are {len(paths)} loss scales in this optimizer state, at {places}. "
        f"{groups if 'inner_states' in places else 'Name'} the one you "
        "mean by passing that part of the state, or its .loss_scale, instead of the whole."
    )


def is_number(scale: Any) -> TypeError:
    """Makes the error for a number in the place of a loss scale."""
    return TypeError(
        f"The loss scale of this optimizer state is a number ({scale}), without counters and bounds. Put "
        "it into the loss scale: optax.tree_utils.tree_set(opt_state, loss_scale=dataclasses.replace("
        "jmp_policy.optim.get_loss_scale_state(opt_state).loss_scale, loss_scale=4.0))."
    )


class Division(NamedTuple):
    """Gradients as an update gets them, and the loss scale that it divides them by.

    Args:
      grads: scaled gradients.
      scale: the loss scale of the optimizer's state.
      initial: the one that the optimizer was made with.
      params: the parameters, or None.
      state: the optimizer's state.
    """

    grads: PyTree
    scale: Any
    initial: Any
    params: PyTree
    state: Any


def explained(divisions: Mapping[str, Division], uses: Any, is_answered: bool) -> str | None:
    """What to warn of gradients that do not plainly come scaled out of a backward pass; None if of nothing.

    `loss_scaled` divides gradients by the scale. Gradients that it never multiplied come out 65536 times too
    small, all of them finite: the model learns that much more slowly, and nothing else shows it. So do those
    that somebody has divided already, or clipped to a norm of 1 before. There are two ways to notice:

    1. While a program is traced, JAX knows what each value was computed from. Where a step is one jitted
       function, the gradients tell: behind them is a backward pass, and nowhere the loss scale of the state.
       That is an error. Where they come of the parameters without a backward pass (`jax.jacfwd`, formulas),
       and where something has clipped or divided them since, it is a warning.
    2. Gradients that were computed in another jitted function, or outside of any, come without a history. A
       record of the scales that were asked for decides whether to warn; nothing else reads it.

    Args:
      divisions: the gradients of each loss, by its name ("" for the only one).
      uses: the record of the scales that were asked for (`forgotten_scale.ScaleUse`).
      is_answered: whether an update was looked at before: then the record gives no warning.

    Raises:
      ValueError: where the running trace shows that no loss scale multiplied them.
    """
    found, any_multiplied = None, False
    for name, division in divisions.items():
        is_multiplied = _is_multiplied(division, uses)
        if is_multiplied:
            any_multiplied = True
            uses.close(division.scale)
        elif is_multiplied is False:
            found = _without_scale(name)
            if any(map(transposes, ancestors(division.grads).equations)):
                raise ValueError(found)
        found = found or _changed_while_scaled(division)
    # Products with scales of other libraries do not enter the record.
    scales, first = [division.scale for division in divisions.values()], next(iter(divisions))
    if found or any_multiplied or not all(isinstance(scale, FromDict) for scale in scales):
        return found
    is_known = _take_one(uses, scales, divisions[first].state) or is_answered
    return None if is_known else _not_asked_for(first)


def _is_multiplied(division: Division, uses: Any) -> bool | None:
    """Whether gradients were computed from their loss scale; None where that is not known.

    They were not, where they come out of a backward pass of the running trace, and have no ancestor in common
    with the scale; as it seems, they were not either where they come of the parameters without one. They were
    where the scale never changes, and something is multiplied by its number. And they may have been all the
    same, and nothing is known, where

    1. the trace has inputs, other than parameters and state, in the shapes of all gradients: these may have
       been computed from them after the backward pass (clipped, preconditioned);
    2. one of these inputs is a number, by which they may have been multiplied then;
    3. the scale never changes, and is a constant of the program, or an input may be it;
    4. they are of another trace than the scale: a branch or a loop with the update inside closes over them;
    5. an input of the trace multiplies the loss: the scale, given apart from its state, or a weight.
    """
    of_grads, of_scale = ancestors(division.grads), ancestors(division.scale)
    if of_grads.meet(of_scale):
        return True
    comes_of_params = of_grads.equations and of_grads.meet(ancestors(division.params))
    if not of_grads.share_trace(of_scale):
        return None
    if not (comes_of_params or any(map(transposes, of_grads.equations))):
        return None
    if getattr(division.initial, "never_changes", False):
        fixed = division.initial.loss_scale
        if not isinstance(fixed, jax.core.Tracer):
            if any(_multiplies_by(node, float(fixed)) for node in of_grads.nodes.values()):
                return True
            if float(fixed) in uses.constants or any(map(_may_be_scale, _foreign(of_grads, division))):
                return None
    # The backward pass of a loss times an input starts with 1 times that.
    factors = {id(x) for x in _foreign(of_grads, division) if _may_be_scale(x)}
    if any(_multiplies_by(node, 1.0, factors) for node in of_grads.nodes.values()):
        return None
    return None if _may_be_inputs(division) else False


def _multiplies_by(node: Any, number: float, others: Collection[int] | None = None) -> bool:
    """Whether a value is a product with a number: of any other value, or of one of `others`, by `id`."""
    _, eqn, operands = compat.traced_by(node) or (None, None, ())
    numbers = map(compat.number_of, operands if eqn and eqn.primitive.name == "mul" else ())
    has_number = any(found is not None and found.shape == () and found == number for found in numbers)
    return has_number and (others is None or any(id(x) in others for x in operands))


def _take_one(uses: Any, scales: Any, state: Any) -> bool:
    """Whether a scale was asked for that may be one of these of a state; ends one use that was open."""
    uses.drop_finished()
    known = [use for use in uses.open if not use.is_traced]
    if known:
        ended = next((use for use in known if use.is_of(scales)), known[0])
        uses.open = [use for use in uses.open if use is not ended]
    in_programs = uses.sizes_in_other_programs & {None, len(jax.tree.leaves(state))}
    return bool(known or uses.open or in_programs)


def _may_be_inputs(division: Division) -> bool:
    """Whether inputs of the trace may be gradients, or a scale, behind these gradients.

    Only what happens after the backward pass counts.
    """
    inputs = _foreign(ancestors(division.grads, stop=ends_backward_pass), division)
    shapes = collections.Counter(map(np.shape, inputs))
    are_gradients = collections.Counter(map(np.shape, jax.tree.leaves(division.grads))) <= shapes
    return are_gradients or any(map(_may_be_scale, inputs))


def _foreign(of_grads: Ancestors, division: Division) -> list[Any]:
    """The inputs behind gradients that are neither parameters nor of the optimizer's state."""
    own = ancestors((division.params, division.state)).nodes
    return [x for x in of_grads.inputs if id(x) not in own]


def _may_be_scale(x: Any) -> bool:
    return x.shape == () and jnp.issubdtype(x.dtype, jnp.inexact)


def _changed_while_scaled(division: Division) -> str | None:
    """What to say of gradients that were clipped, divided or repaired between backward pass and update.

    Who clips and divides, and multiplies by the scale again, is right.
    """
    near, scales = ancestors(division.grads, stop=ends_backward_pass), _arrays_of(division.scale)
    # Parameters that weight decay adds may come of an earlier update in the same program.
    earlier = ancestors(division.params).nodes
    tests = {id(node): node for key, node in near.nodes.items() if key not in earlier and _is_test(node)}
    if tests and _repairs(division.grads, Ancestors(tests, [], []), _first_gradients(near, division)):
        return _REPAIRED
    of_scale = ancestors(division.scale)
    if of_scale.nodes and not near.share_trace(of_scale):
        return None  # Around a branch or a loop they may have been multiplied again.
    has_scale = not scales.isdisjoint(near.nodes)
    since = [eqn for eqn in near.equations if id(eqn) not in earlier and not ends_backward_pass(eqn)]
    if not has_scale and any(map(_depends_on_size, since)):
        return _CLIPPED.format("optax has")
    found = degrees(division.grads, division.params, division.scale)
    is_divided = has_scale and any(degree is not None and degree < 1 for degree in found)
    return _DIVIDED if is_divided else _CLIPPED.format("were") if found else None


def _repairs(grads: PyTree, tests: Ancestors, first: Ancestors) -> bool:
    """Whether tests for finiteness are of gradients, or choose between these and something else.

    The value of a loss, by which gradients may be weighted, has tests inside too: that of a logsumexp.
    """
    of_gradients, of_tests = computed_from(grads, first), computed_from(grads, tests)
    if not of_gradients.isdisjoint(tests.nodes):
        return True
    for node in ancestors(grads).nodes.values():
        _, _, operands = compat.traced_by(node) or (None, None, ())
        read = [traced[0] for traced in map(compat.traced_by, operands) if traced is not None]
        by_test = any(x.dtype == bool and id(x) in of_tests for x in read)
        if by_test and any(id(x) in of_gradients for x in read):
            return True
    return False


def _first_gradients(near: Ancestors, division: Division) -> Ancestors:
    """What the backward pass gives; where there is none, the inputs that have the shape of a gradient."""
    ends = {id(eqn) for eqn in near.equations if ends_backward_pass(eqn)}
    shapes = set(map(np.shape, jax.tree.leaves(division.grads)))
    found = [x for x in near.nodes.values() if id((compat.traced_by(x) or (x, None))[1]) in ends]
    found = found or [x for x in _foreign(near, division) if x.shape in shapes]
    return Ancestors({id(x): x for x in found}, [], [])


def _arrays_of(scale: Any) -> set[int]:
    """The traced arrays of a loss scale, by identity."""
    return {id(traced[0]) for x in jax.tree.leaves(scale) if (traced := compat.traced_by(x))}


def _is_test(node: Any) -> bool:
    """Whether a value says what of another one is not finite, or replaces that."""
    traced = compat.traced_by(node)
    return traced is not None and traced[1] is not None and _tests_finiteness(traced[1])


def _tests_finiteness(eqn: Any) -> bool:
    """Whether an equation tests for finiteness (NaN differs from itself), or calls a function that does.

    Of JAX's own functions only `jnp.nan_to_num` counts: a median looks for NaN too.
    """
    name, operands = eqn.primitive.name, eqn.invars
    if transposes(eqn):
        return False
    if name in ("is_finite", "all_finite") or (name == "ne" and operands[0] is operands[1]):
        return True
    inner = list(map(compat.open_jaxpr, calls.inner_jaxprs(eqn)))
    users = [jaxpr for jaxpr in inner if not compat.file_of(jaxpr).startswith(_JAX)]
    return eqn.params.get("name") == "nan_to_num" or any(_tests_finiteness(e) for x in users for e in x.eqns)


def _power_in_factor(x: Any, scales: set[int]) -> int:
    """1 for a loss scale that was cast or multiplied by a number, -1 for 1 / scale; 0 for another factor."""
    power = 1
    while (traced := compat.traced_by(x)) is not None and id(traced[0]) not in scales:
        _, eqn, operands = traced
        places = [i for i, operand in enumerate(operands) if compat.number_of(operand) is None]
        if len(places) != 1:
            return 0
        if eqn.primitive.name == "integer_pow":
            power *= eqn.params["y"]
        elif eqn.primitive.name == "div" and places == [1]:
            power = -power
        x = operands[places[0]]
    return power if traced is not None else 0


def warn_if_scaled(products: Sequence[tuple[Any, Sequence[Any]]], scale: Any) -> None:
    """Warns where a loss is multiplied by a scale that is a factor of it already.

    Args:
      products: the equations that gave the parts of the loss, with their factors.
      scale: the loss scale.
    """
    scales = _arrays_of(scale)
    for eqn, factors in products:
        if any(_power_in_factor(x, scales) == 1 for x in factors):
            warnings.warn(_SCALED_TWICE.format(source_line(eqn)), UserWarning, stacklevel=5)


def _depends_on_size(eqn: Any) -> bool:
    """Whether an equation is of an optax transformation whose result depends on the size of gradients."""
    for frame in compat.frames(eqn):
        if frame.file_name.startswith(_JAX):
            continue
        if not frame.file_name.startswith(_OPTAX):
            return False  # Somebody else's transformation, which an optax.chain calls.
        if ".update_fn" in frame.function_name:
            return frame.function_name.split(".")[0] not in _LINEAR
    return False


_JAX, _OPTAX = directory_of("jax"), directory_of("optax")

#: Transformations of optax that give k times their result for gradients that are k times as large.
_LINEAR = {"scale", "scale_by_schedule", "centralize", "flatten", "set_to_zero"}


#: Of what optax, or somebody else, has changed between the backward pass and the update.
_CLIPPED = (
    "loss_scaled gets gradients that {} clipped, normalised or changed otherwise while the loss scale "
    "was in them: they are divided by the scale afterwards, so that a norm of 1 becomes 1/65536. Put "
    "everything that looks at gradients inside: loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), "
    "optimizer), loss_scale)."
)

#: Of gradients in which what was not finite has been replaced.
_REPAIRED = (
    "loss_scaled gets gradients that were tested for NaN and infinities: where those are replaced, it sees "
    "no overflow, skips no step and never lowers the loss scale. Give update the gradients as they are: it "
    "skips the step where they are not finite."
)

#: Of a loss function that returns the loss times its scale.
_SCALED_TWICE = (
    "The loss is multiplied by the loss scale a second time, after {}: its gradients become 65,536 times too "
    "large at a scale of 65,536. scaled_value_and_grad multiplies by it: let the loss function return the "
    "loss itself."
)

#: Of what somebody else has divided there.
_DIVIDED = (
    "loss_scaled gets gradients that were divided by the loss scale already, and divides them again: the "
    "parameters learn 65,536 times too slowly at a scale of 65,536. Give update the gradients as "
    "scaled_value_and_grad returns them."
)


def _without_scale(loss: str) -> str:
    """Of gradients that no loss scale multiplied, as their program shows."""
    return (
        f"loss_scaled divides the gradients{f' of {loss!r}' if loss else ''} by the loss scale in its state, "
        "and they were computed in this function without it: the parameters would learn 65,536 times too "
        f"slowly at a scale of 65,536. {_repair(loss)}"
    )


def _not_asked_for(loss: str) -> str:
    """Of gradients whose history is not known, where no loss was multiplied by the scale."""
    return (
        "loss_scaled divides gradients by the loss scale in its state, and no loss was multiplied by the "
        "scale: if nothing else did it, the parameters learn 65,536 times too slowly at a scale of 65,536. "
        f"{_repair(loss)}"
    )


def _repair(loss: str) -> str:
    state = "jmp_policy.optim.get_loss_scale_state(opt_state)"
    by_hand = f"{state}.loss_scale[{loss!r}].scale(loss)" if loss else f"{state}.loss_scale.scale(loss)"
    argument = f", loss={loss!r}" if loss else ""
    return (
        f"Use `loss, grads = jmp_policy.scaled_value_and_grad(loss_fn{argument})(opt_state, params)` in "
        f"place of jax.value_and_grad; or, to scale by hand, differentiate what {by_hand} returns."
    )
