"""The first non-finite value of a loss and its gradients, and what to do about it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy import _jax
from jmp_policy._dtypes import widened
from jmp_policy._grad import split_loss
from jmp_policy._report import Report, Table, joined
from jmp_policy._types import PyTree
from jmp_policy.report._function import Function, as_function
from jmp_policy.report._scale import as_loss_scale
from jmp_policy.report._trail import Step, Trail, range_of
from jmp_policy.report._walk import Site


@dataclasses.dataclass(frozen=True)
class Operand:
    """What the operation that failed was given.

    Args:
      name: the argument that it is ("params/head/kernel"), or "".
      dtype, shape: of the array.
      largest: its largest finite magnitude.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    largest: float


@dataclasses.dataclass(frozen=True)
class Diagnosis(Report):
    """The first non-finite value of a loss and its gradients; `str` says what happened and what to do.

    Args:
      function: name of the loss function.
      finite: whether loss and gradients are all finite; the fields below then are empty.
      loss: the loss, scale taken off.
      loss_scale: what the loss was multiplied by.
      bad_results: names of what is not finite in the end: "the loss", gradients by their path.
      kind: "overflow" (finite in float32), "underflow" (finite in float32: a divisor, or the argument of a
        logarithm, became zero), "not finite" (nor is it in float32) or "argument" (it was so to begin with).
      path: names of the scopes around it, joined by slashes; the name of an argument.
      line: where the user wrote it.
      backward: whether it is in the backward pass.
      operation: name of the primitive that made it.
      trip: which trip of a loop, counted from 0; None outside of loops.
      dtype, shape: of the array.
      is_nan: whether it holds NaNs; infinities otherwise.
      operands: what the operation was given.
      largest_before: largest finite magnitude in the same dtype among all values before.
      largest_before_place: where that was.
      largest_in_float32: largest finite magnitude of the same value in float32; nan where it is not finite.
      advice: what to do.
    """

    function: str
    finite: bool
    loss: float
    loss_scale: float
    bad_results: tuple[str, ...] = ()
    kind: str = ""
    path: str = ""
    line: str = ""
    backward: bool = False
    operation: str = ""
    trip: int | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_nan: bool = False
    operands: tuple[Operand, ...] = ()
    largest_before: float = 0.0
    largest_before_place: str = ""
    largest_in_float32: float = math.nan
    advice: str = ""

    _rows = "operands"

    @property
    def place(self) -> str:
        """The path, and the file and line: "Net/head (mlp.py:41)"."""
        return Site(path=self.path, line=self.line).place

    @property
    def verdict(self) -> str:
        """What happened, in one sentence."""
        if self.finite:
            return f"{self.function}: the loss ({self.loss:.6g}) and all gradients are finite."
        what = "NaN" if self.is_nan else "infinite"
        if self.kind == "argument":
            return f"{self.path} is not finite to begin with ({what}, {self.dtype}{list(self.shape)})."
        where = f"{'backward' if self.backward else 'forward'}, in {self.place}"
        trip = "" if self.trip is None else f", trip {self.trip}"
        ends = {
            "overflow": f"an overflow: in float32 it is finite, at most {self.largest_in_float32:.4g}",
            "underflow": "an underflow: in float32 it is finite, but something became zero in half precision",
            "not finite": "not finite in float32 either",
        }
        return (
            f"The first non-finite value is {what}: the result of {self.operation} "
            f"({self.dtype}{list(self.shape)}), {where}{trip}; {ends[self.kind]}."
        )

    def _tables(self) -> Sequence[Table]:
        if not self.operands:
            return ()
        rows = [(o.name or "(computed)", o.dtype, list(o.shape), f"{o.largest:.4g}") for o in self.operands]
        return [Table(("operand", "dtype", "shape", "largest "), rows, f"What {self.operation} was given")]

    def _lines(self) -> Sequence[str]:
        if self.finite:
            return [self.verdict]
        lines = [self.verdict]
        if self.largest_before_place:
            lines.append(
                f"Largest {self.dtype} value before: {self.largest_before:.4g}, {self.largest_before_place}."
            )
        lines.append(f"Not finite in the end: {joined(self.bad_results, 6)}.")
        return [*lines, self.advice]


def diagnose(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    scale: Any = 1.0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Diagnosis:
    """Finds the first non-finite value of a loss and its gradients, and whether float32 would have it too.

    Runs the forward and the backward pass operation by operation, which is slow, and holds every value: call
    it once training has failed, with the parameters and the batch of that step. Infinities that end as
    zeros, such as those of masks, are no fault.

    Args:
      loss_fn: a loss function `(params, *args) -> scalar`; of NNX modules `(model, *args) -> scalar`.
      params: a pytree of arrays, or an NNX model.
      args, kwargs: the rest of its arguments.
      scale: what the loss is multiplied by: a number, a loss scale, or an optimizer state that holds one.
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      A `Diagnosis`; `print` shows it.

    Raises:
      TypeError: for a loss that is no scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss_fn(w, x):
      ...     return jnp.square(w.astype(jnp.float16) * x).astype(jnp.float32).sum()
      >>> found = diagnose(loss_fn, jnp.float32(300.0), jnp.float16(1.0))
      >>> found.kind, found.operation, found.largest_in_float32
      ('overflow', 'square', 90000.0)
    """
    function = as_function(loss_fn, (params, *args), kwargs, "diagnose")
    loss_scale = float(as_loss_scale(scale).loss_scale)
    trained = [i for i, a in enumerate(function.arguments) if a.position == 0 and a.trainable]
    jaxpr = jax.make_jaxpr(_value_and_gradients(function, trained, loss_scale, has_aux))(function.arrays)
    trail = Trail(jaxpr, function.arrays)
    loss = float(np.asarray(trail.values[trail.results[0]]).astype(np.float64))
    names = ["the loss", "the scaled loss", *(function.arguments[i].path for i in trained)]
    bad = tuple(n for n, p in zip(names, trail.results, strict=True) if not trail.ranges[p].is_finite)
    found = Diagnosis(function.name, not bad, loss, loss_scale, bad)
    culprit = trail.culprit()
    if not bad:
        return found
    if culprit is None:
        advice = "The program itself holds a constant that is not finite, and hands it on to the result."
        return dataclasses.replace(found, kind="argument", path="a constant of the program", advice=advice)
    if culprit < -1:
        return _of_argument(found, trail, -2 - culprit, function)
    return _of_step(found, trail, culprit, function)


def _value_and_gradients(
    function: Function, trained: Sequence[int], loss_scale: float, has_aux: bool
) -> Callable[..., Any]:
    """The loss, the loss times its scale, and the gradients of the latter."""

    def program(arrays: Sequence[Any]) -> Any:
        def scaled(params: Sequence[Any]) -> Any:
            whole = list(arrays)
            for i, param in zip(trained, params, strict=True):
                whole[i] = param
            loss, _ = split_loss(function.result(whole), has_aux)
            loss = jnp.asarray(loss)
            # As in training: float16 holds no larger seed.
            factor = min(loss_scale, 2.0**15) if loss.dtype == jnp.float16 else loss_scale
            product = loss.astype(widened(loss.dtype)) * jnp.float32(factor)
            return product, loss

        (product, loss), grads = jax.value_and_grad(scaled, has_aux=True)([arrays[i] for i in trained])
        return [loss, product, *grads]

    return program


def _of_argument(found: Diagnosis, trail: Trail, index: int, function: Function) -> Diagnosis:
    argument, place = function.arguments[index], trail.arguments[index]
    value = trail.values[place]
    advice = "Clean the data: neither a loss scale nor a policy can help."
    if argument.position == 0:
        advice = (
            "An update that was not skipped made it: train with loss_scaled, from the last good checkpoint."
        )
    return dataclasses.replace(
        found,
        kind="argument",
        path=argument.path,
        dtype=str(value.dtype),
        shape=tuple(value.shape),
        is_nan=trail.ranges[place].nan,
        advice=advice,
    )


def _of_step(
    found: Diagnosis, trail: Trail, index: int, function: Function, names: dict[int, str] | None = None
) -> Diagnosis:
    step = trail.steps[index]
    if names is None:
        names = {place: function.arguments[i].path for place, i in trail.origins.items()}
    if step.eqn.primitive.name in ("scan", "while"):
        for trip, inner in enumerate(_trips(trail, step)):
            culprit = inner.culprit()
            if culprit is not None and culprit >= 0:
                return _of_step(dataclasses.replace(found, trip=trip), inner, culprit, function, {})
    place = next(p for p in step.writes if not trail.ranges[p].is_finite)
    value = trail.values[place]
    in_float32 = range_of(trail.in_float32(place))
    kind = "not finite"
    if in_float32.is_finite:
        kind = "underflow" if _divides_by_lost(trail, step) else "overflow"
    before, where = _largest_before(trail, index, value.dtype)
    found = dataclasses.replace(
        found,
        kind=kind,
        path=step.site.path,
        line=step.site.line,
        backward=step.site.backward,
        operation=step.eqn.primitive.name,
        dtype=str(value.dtype),
        shape=tuple(value.shape),
        is_nan=trail.ranges[place].nan,
        operands=tuple(_operand(trail, p, names.get(p, "")) for p in step.reads),
        largest_before=before,
        largest_before_place=where,
        largest_in_float32=in_float32.largest if in_float32.is_finite else math.nan,
    )
    return dataclasses.replace(found, advice=_advice(found))


def _operand(trail: Trail, place: int, name: str) -> Operand:
    value = trail.values[place]
    return Operand(name, str(value.dtype), tuple(value.shape), trail.ranges[place].largest)


def _largest_before(trail: Trail, index: int, dtype: Any) -> tuple[float, str]:
    """The largest finite magnitude that an earlier operation made in a dtype, and where."""
    found = (0.0, "")
    for step in trail.steps[:index]:
        for place in step.writes:
            largest = trail.ranges[place].largest
            if largest > found[0] and getattr(trail.values[place], "dtype", None) == dtype:
                found = (largest, f"{step.eqn.primitive.name} in {step.site.place}")
    return found


#: Operations for which an operand that was lost to zero is the end.
_ENDS_AT_ZERO = frozenset(["div", "log", "rsqrt", "pow", "integer_pow", "log1p", "cbrt", "sqrt", "rem"])


def _divides_by_lost(trail: Trail, step: Step) -> bool:
    """Whether an operand holds zeros that float32 would not have."""
    if step.eqn.primitive.name not in _ENDS_AT_ZERO:
        return False
    for place in step.reads:
        zero = np.asarray(trail.values[place]) == 0
        if zero.any() and (np.asarray(trail.in_float32(place))[zero] != 0).any():
            return True
    return False


def _trips(trail: Trail, step: Step) -> Iterator[Trail]:
    """The trips of a loop, each on its own trail."""
    params, values = step.eqn.params, [trail.values[place] for place in step.reads]
    if step.eqn.primitive.name == "scan":
        consts, carries = _jax.scan_sizes(params)
        fixed, carry, xs = values[:consts], values[consts : consts + carries], values[consts + carries :]
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            inner = Trail(params["jaxpr"], [*fixed, *carry, *(x[i] for x in xs)], step.site)
            yield inner
            carry = [inner.values[place] for place in inner.results[:carries]]
        return
    first, second = params["cond_nconsts"], params["body_nconsts"]
    tested, fixed, carry = values[:first], values[first : first + second], values[first + second :]
    while True:
        test = Trail(params["cond_jaxpr"], [*tested, *carry], step.site)
        if not bool(test.values[test.results[0]]):
            return
        inner = Trail(params["body_jaxpr"], [*fixed, *carry], step.site)
        yield inner
        carry = [inner.values[place] for place in inner.results]


def _advice(found: Diagnosis) -> str:
    part = f"{found.path!r}" if found.path else f"the function at {found.line}"
    if found.kind == "underflow":
        return (
            f"Something became zero in {found.dtype} (the smallest number of float16 is 6e-8): enlarge the "
            f"epsilon that guards it to 1e-4 or more, or compute {part} in float32: by a rule of a "
            "PolicyMap, or with full_precision around it."
        )
    if found.kind == "overflow" and found.backward:
        return (
            f"The scaled gradient exceeds {found.dtype} at a loss scale of {found.loss_scale:g}. "
            "DynamicLossScale lowers it by itself; a constant scale must be smaller (gradient_spectrum says "
            f"which). At a scale of 1 already: compute {part} in float32 or bfloat16."
        )
    if found.kind == "overflow":
        limit = "65504" if found.dtype == "float16" else f"the range of {found.dtype}"
        return (
            f"The activation exceeds {limit}; no loss scale can help. Compute {part} in float32, or in "
            "bfloat16, which has float32's range: by a rule of a PolicyMap or with full_precision around it. "
            "Or make what it is given smaller: normalise before it."
        )
    return _ADVICE.get(
        found.operation,
        "It is not the precision: in float32 it is not finite either. Look for what feeds this operation.",
    )


#: By operation, what makes it non-finite in any precision.
_ADVICE = {
    "div": "A division by zero, in any precision. Guard the divisor itself (jnp.where(x == 0, 1, x) before "
    "dividing): a where after the division stops the value, but its gradient is 0 * inf = NaN.",
    "log": "A logarithm of zero or of a negative number, in any precision. Clamp its argument, or use "
    "log_softmax, log1p, xlogy or logsumexp.",
    "sqrt": "A square root of a negative number, in any precision. Clamp its argument.",
    "rsqrt": "A reciprocal square root of zero or of a negative number, in any precision. Add an epsilon.",
    "sub": "inf - inf: most often a row of a mask that is all -inf. Use jnp.finfo(dtype).min, or leave one "
    "entry unmasked.",
    "mul": "0 * inf, or a product beyond float32. In a backward pass it is most often the gradient of a "
    "where whose other branch is infinite: guard the argument before the operation, not the result after it.",
    "exp": "An exponential beyond float32. Subtract the maximum first (logsumexp, softmax).",
    "pow": "A power of zero or of a negative number, in any precision. Clamp its base.",
}
