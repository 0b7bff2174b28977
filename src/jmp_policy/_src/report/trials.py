"""Runs a loss again under other rules, to see which of them mend what a report found.

What is tried, in this order, is a smaller loss scale, where the gradient overflows at 1; float32 for weight
gradients, where sums of those are what is wrong; float32 for the modules that a report names, then for what
is around them, then for all of their class; then half precision in layers that are products alone; then
bfloat16 in place of float16. Those that leave hardly anything in half are tried where none of the others
mends. The first that mends is advised.

Rules can be replaced where Linen modules are wrapped or run in a block under `intercept`, in NNX models that
were wrapped themselves (no parts of them; what `nnx.merge` makes of their state is one), and in what
`autocast` made.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.report_base import percent
from jmp_policy._src.jaxpr.float32_replay import replay_in_float32
from jmp_policy._src.loss_scaling.float16_loss import first_cotangent
from jmp_policy._src.policy.frameworks import imported_frameworks
from jmp_policy._src.policy.patterns import Pattern, show_pattern
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import PolicyMap, get_policy
from jmp_policy._src.policy.scope import TRIAL
from jmp_policy._src.report import lost_constants, progress
from jmp_policy._src.report.audit import audit_of
from jmp_policy._src.report.function import Function
from jmp_policy._src.report.lost_constants import lost_constants_of, without_overflow_warnings
from jmp_policy._src.report.pieces import compiled_quickly
from jmp_policy._src.report.tapping import Calls, plain_names, watching_modules

#: A gradient that is off by no more is mended, whatever else is known.
_MENDED = 0.02

#: A gradient that is off by more is none that a report advises.
_TOLERABLE = 0.1

#: Where less of the FLOPs is in half, advice says so.
_MOSTLY_HALF = 0.5

#: Where less of them is, and of what is in half without a rule, it is tried if nothing else mends.
_HARDLY_HALF = 0.1

#: How much smaller the next loss scale is, where a scaled gradient overflows, and the least one.
_SMALLER, _SMALLEST = 2.0**4, 2.0**-14

#: At most so many modules are tried one by one.
_MOST = 4


class Met:
    """The rules of the modules that run while it is the trial, each once, in `rules`."""

    def __init__(self) -> None:
        self.rules: dict[PolicyMap, None] = {}


@dataclasses.dataclass(frozen=True)
class Tried:
    """Rules that a report has tried.

    Args:
      rule: overrides to put before those of the `PolicyMap`; empty where the whole policy is another one.
      policy: the whole policy with them.
      error: relative L2 error of the gradient under it, against the model in float32; infinite where the
        gradient or the loss is not finite, nan where it was not measured.
      half_share: share of the FLOPs of products that is in half under it; nan where it was not looked at.
      loss_scale: the smaller loss scale that it needs; nan where that of the report will do, or none.
      is_own: whether the policy is the model's own, and only the loss scale another one.
    """

    rule: Mapping[Pattern, str]
    policy: PolicyMap
    error: float
    half_share: float = math.nan
    loss_scale: float = math.nan
    is_own: bool = False

    @property
    def text(self) -> str:
        """Formats it as one would write it: "the rule {'drop': 'float32'}"."""
        if self.is_own:
            return f"a loss scale of {self.loss_scale:g} (`DynamicLossScale`)"
        if not self.rule:
            is_plain = self.policy == PolicyMap(self.policy.default)
            whole = repr(str(self.policy.default)) if is_plain else repr(self.policy)
            return f"the policy {whole}"
        rule = ", ".join(f"{show_pattern(p)}: {policy!r}" for p, policy in self.rule.items())
        return f"the rule {{{rule}}}"

    @property
    def price(self) -> str:
        """Says how little is left in half and which loss scale it needs, after commas; "" if neither."""
        share = percent(self.half_share) if self.half_share else "none"
        text = f", with {share} of the FLOPs in half" * (self.half_share < _MOSTLY_HALF)
        text += ", which gains nothing over float32" * (self.half_share == 0)
        return text + self.scale

    @property
    def scale(self) -> str:
        """Names the smaller loss scale that it needs, with a comma before; "" without one."""
        if math.isnan(self.loss_scale) or self.is_own:
            return ""
        return f", at a loss scale of {self.loss_scale:g} (DynamicLossScale falls to it by itself)"

    @property
    def is_mended(self) -> bool:
        """Whether the error is so small that training is worth a try."""
        return self.error <= _TOLERABLE


def tried_text(tried: Sequence[Tried]) -> str:
    """Says what was tried, and what came of it; "" if nothing was."""
    if not tried:
        return ""
    results = (f"{t.text}: {error_text(t.error)}{t.scale}" for t in tried)
    return f"Tried, with the error of the gradient: {'; '.join(results)}."


def error_text(error: float) -> str:
    """Formats a relative error: "0.2 %"."""
    if not np.isfinite(error):
        return "not finite"
    return f"{100 * error:.3g} %" if error >= 1e-4 else f"{error:.2g}"


def products_alone(rules: PolicyMap, kinds: Iterable[type]) -> PolicyMap:
    """Rules with float32 as the default, under which layers of some classes compute in half.

    Args:
      rules: rules whose default is in half.
      kinds: classes of layers whose work is a matrix product.
    """
    in_half = dataclasses.replace(rules.default, output_dtype=jnp.float32)
    overrides = [*rules.overrides, *((kind, in_half) for kind in kinds)]
    return dataclasses.replace(rules, default=get_policy("float32"), overrides=overrides)


def grad_in_float32(own: PolicyMap) -> PolicyMap:
    """Rules under which half-precision layers return weight gradients in float32."""

    def changed(policy: Policy) -> Policy:
        return (
            dataclasses.replace(policy, grad_dtype=jnp.float32) if is_half(policy.compute_dtype) else policy
        )

    overrides = [(pattern, changed(policy)) for pattern, policy in own.overrides]
    return dataclasses.replace(own, default=changed(own.default), overrides=overrides)


def product_layers(modules: Iterable[Any]) -> list[type]:
    """The classes among those of modules whose work is a matrix product."""
    kinds = dict.fromkeys(kind for framework in imported_frameworks() for kind in framework.products)
    modules = list(modules)
    return [kind for kind in kinds if any(isinstance(module, kind) for module in modules)]


class Mending:
    """Tries rules for a loss of wrapped modules.

    Args:
      function: the loss.
      loss_scale: what it is multiplied by.
      has_aux: whether it returns more than the loss.
    """

    def __init__(self, function: Function, loss_scale: float, has_aux: bool):
        self._function, self._loss_scale, self.has_aux = function, loss_scale, has_aux
        self._program, self._arrays = self._scaled(loss_scale), function.arrays
        self.tried: list[Tried] = []

    def best(
        self,
        paths: Sequence[str],
        *,
        limit: float = _MENDED,
        before: float = np.inf,
        in_sums: bool = False,
        in_scale: bool = False,
    ) -> Tried | None:
        """Tries rules until one mends.

        Args:
          paths: of modules where something was lost, most important first.
          limit: relative error at which no more are tried.
          before: the error without any, which is to be halved at least.
          in_sums: whether it was lost in sums of weight gradients.
          in_scale: whether a gradient overflows that a loss scale below 1 may keep finite.

        Returns:
          The first within the limit; else the one with the least error, if that is tolerable and less than
          half of `before`. None without one.
        """
        with without_overflow_warnings(), progress.interruptible("other rules were not tried"):
            self._try(paths, limit, before, in_sums, in_scale)
        # Where one was within the limit it was the last, and all before it are further off.
        best = min(self.tried, key=lambda tried: tried.error, default=None)
        return best if best is not None and best.is_mended and best.error < before / 2 else None

    def _half_share(self, policy: PolicyMap) -> float:
        """The share of the FLOPs that is in half under a policy; nan where the code does not run under it."""
        with contextlib.suppress(Exception), TRIAL(policy), warnings.catch_warnings(action="ignore"):
            jaxpr = jax.make_jaxpr(self._program)(self._arrays)
            return audit_of("", jaxpr, [""] * len(self._arrays)).half_share
        return math.nan

    def keeping(self, constants: Sequence[lost_constants.LostConstant]) -> Tried | None:
        """The rule under which a trace shows no lost constants; None without one."""
        own = self._rules() if constants else None
        rule = {} if own is None else self._of_all([path for c in constants for path in (c.path, *c.others)])
        if own is None or not rule:
            return None
        policy = _with_rule(own, rule)
        missing = "no rule that keeps constants was tried"
        # A rule may be none for the code that runs.
        with contextlib.suppress(Exception), without_overflow_warnings(), progress.interruptible(missing):
            with TRIAL(policy):
                jaxpr = jax.make_jaxpr(self._program)(self._arrays)
            if not lost_constants_of(jaxpr, self._program, self._arrays).found():
                return Tried(rule, policy, np.nan)
        return None

    def _try(self, paths: Sequence[str], limit: float, before: float, in_sums: bool, in_scale: bool) -> None:
        own = self._rules()
        if own is None:
            return
        # A rule may be none for the code that runs: then it is not tried.
        with contextlib.suppress(Exception):
            _, self._exact = self._gradient_under(PolicyMap("float32"), replay_in_float32)(1.0)
            if not all(np.isfinite(g).all() for g in self._exact):
                return
            wide = grad_in_float32(own)
            first = [({}, own)] * in_scale + [({}, wide)] * (in_sums and wide != own)
            candidates = [*first, *self._candidates(own, paths, in_sums)]
            in_order = self._cheap_first(progress.steps("trying rules", candidates), own, before)
            for rule, policy, share in in_order:
                with contextlib.suppress(Exception):
                    tried = self._tried(rule, policy, policy == own)
                    self.tried.append(dataclasses.replace(tried, half_share=share))
                    if tried.error <= limit:
                        return

    def _cheap_first(
        self, candidates: Iterable[tuple[Mapping[Pattern, str], PolicyMap]], own: PolicyMap, before: float
    ) -> Iterator[tuple[Mapping[Pattern, str], PolicyMap, float]]:
        """Adds what each leaves in half; where that is hardly anything, it comes if no other mends."""
        last = []
        for rule, policy in candidates:
            share = self._half_share(policy)
            if share < _HARDLY_HALF and share < _HARDLY_HALF * self._half_share(own):
                last.append((rule, policy, share))
            else:
                yield rule, policy, share
        if not any(tried.error <= _MENDED and tried.error < before / 2 for tried in self.tried):
            yield from last

    def _rules(self) -> PolicyMap | None:
        """The rules of the modules that the loss runs; None without any, and for several."""
        met, calls = Met(), Calls(lambda module: module)
        with TRIAL(met), watching_modules(calls):
            jax.eval_shape(self._program, self._arrays)
        modules = {"/".join(plain_names([call.name])): module for call, module in calls.calls}
        # A wrapped NNX module is of a class of its own.
        self._paths = {path: getattr(type(m), "_jmp_policy_bare", type(m)) for path, m in modules.items()}
        self._products = product_layers(modules.values())
        return next(iter(met.rules)) if len(met.rules) == 1 else None

    def _module(self, path: str) -> str:
        """The innermost module that a report's path leads to, as a rule writes it; "" for the model."""
        if not self._paths:
            return path  # Of a function whose scopes are named by hand.
        # Named scopes are no part of a module's path, and a shared module has the scopes of two places.
        names = plain_names([path])
        around = (known for known in self._paths if _is_part(known.split("/"), names))
        return max(around, key=lambda known: known.count("/"), default="").partition("/")[2]

    def _candidates(
        self, own: PolicyMap, paths: Sequence[str], in_sums: bool
    ) -> Iterator[tuple[Mapping[Pattern, str], PolicyMap]]:
        default, named = own.default, self._named(paths)
        kinds = {path.partition("/")[2]: kind for path, kind in self._paths.items()}
        modules = kinds or {*named}
        around = [path.rsplit("/", n)[0] for path in named for n in range(path.count("/") + 1)]
        around = [path for path in around if path in modules]  # Lists of modules are none.
        rules: list[dict[Pattern, str]] = [{path: "float32"} for path in dict.fromkeys(around)]
        together = _together(named)
        rules = rules[:_MOST] + [together] * (len(together) > 1)
        # What fails in one layer may in all that are like it.
        alike = [kind for kind in map(kinds.get, named[:1]) if [*kinds.values()].count(kind) > 1]
        for rule in [*rules, *({kind: "float32"} for kind in alike if kind not in self._products)]:
            yield rule, _with_rule(own, rule)
        if is_half(default.compute_dtype) and self._products:
            alone = products_alone(own, self._products)
            yield {}, grad_in_float32(alone) if in_sums else alone
        if default.compute_dtype == jnp.float16:
            overrides = [(pattern, _in_bfloat16(policy)) for pattern, policy in own.overrides]
            yield {}, dataclasses.replace(own, default=_in_bfloat16(default), overrides=overrides)

    def _of_all(self, paths: Sequence[str]) -> dict[Pattern, str]:
        """One rule for the modules that a report's paths lead to: for their class, if they are all of it."""
        named = self._named(paths)
        kinds = {path.partition("/")[2]: kind for path, kind in self._paths.items()}
        of_first = kinds.get(named[0]) if len(named) > 1 else None
        if of_first is not None and {path for path, kind in kinds.items() if kind is of_first} == {*named}:
            return {of_first: "float32"}
        return _together(named)

    def _named(self, paths: Iterable[str]) -> list[str]:
        """The modules that a report's paths lead to, the model aside."""
        return list(filter(None, dict.fromkeys(map(self._module, paths))))

    def _scaled(self, loss_scale: Any) -> Callable[..., Any]:
        return self._function.value_and_gradients("a report", loss_scale, self.has_aux)[0]

    def _gradient_under(
        self, rules: PolicyMap, changed: Callable[..., Any] = lambda program: program
    ) -> Callable[[float], tuple[bool, list[np.ndarray]]]:
        """A function of a loss scale to whether the loss is finite under rules, and its unscaled gradient."""
        # Traced once: the loss scale is an argument, as in training.
        program = compiled_quickly(changed(lambda scale, arrays: self._scaled(scale)(arrays)))

        def gradient(scale: float) -> tuple[bool, list[np.ndarray]]:
            # Of weights that `grad=float32` does not reach: then it does not mend.
            with TRIAL(rules), warnings.catch_warnings(action="ignore", category=UserWarning):
                loss, _, *gradient = program(jnp.float32(scale), self._arrays)
            seed, numbers = float(first_cotangent(loss.dtype, scale)), map(np.asarray, gradient)
            numbers = [g.astype(np.float64) / seed for g in numbers if jnp.issubdtype(g.dtype, jnp.floating)]
            return bool(np.isfinite(loss)), numbers

        return gradient

    def _tried(self, rule: Mapping[Pattern, str], policy: PolicyMap, is_own: bool) -> Tried:
        """What came of rules: where only the scaled gradient overflows, at a smaller loss scale."""
        whole, scale = sum(np.square(exact).sum() for exact in self._exact), self._loss_scale
        smallest, gradient = _SMALLEST if is_own else 1.0, self._gradient_under(policy)
        while True:
            is_finite, found = gradient(scale)
            with np.errstate(invalid="ignore"):
                error = sum(np.square(f - e).sum() for f, e in zip(found, self._exact, strict=True))
            if np.isfinite(error) or not is_finite or scale <= smallest:
                break
            scale = max(scale / _SMALLER, smallest)
        error = float(np.sqrt(error / whole)) if whole and np.isfinite(error) else float(error and np.inf)
        error = error if is_finite else math.inf  # Steps with an infinite loss are skipped.
        is_needed = is_own or (scale < self._loss_scale and math.isfinite(error))
        return Tried(rule, policy, error, loss_scale=scale if is_needed else math.nan, is_own=is_own)


def _together(named: Sequence[str]) -> dict[Pattern, str]:
    """One rule for all modules; it is for what is below them too."""
    tops = [path for path in named if not any(path.startswith(f"{other}/") for other in named)]
    return dict.fromkeys(tops, "float32")


def _with_rule(own: PolicyMap, rule: Mapping[Pattern, str]) -> PolicyMap:
    return dataclasses.replace(own, overrides=[*rule.items(), *own.overrides])


def _is_part(some: Sequence[str], names: Sequence[str]) -> bool:
    """Whether names are among others, in this order."""
    rest = iter(names)
    return all(name in rest for name in some)


def _in_bfloat16(policy: Policy) -> Policy:
    names = [field.name for field in dataclasses.fields(policy) if getattr(policy, field.name) == jnp.float16]
    return dataclasses.replace(policy, **dict.fromkeys(names, jnp.bfloat16))
