"""Mixed-precision training for JAX and Flax: policies, loss scaling, and reports on both.

Three changed lines turn a float32 training step into a mixed-precision one::

    model = jmp_policy.wrap(Net(), "mixed_float16")
    tx = jmp_policy.loss_scaled(optax.adamw(1e-3), jmp_policy.DynamicLossScale())
    loss, grads = jmp_policy.scaled_value_and_grad(loss_fn)(opt_state, params)
"""

import importlib as _importlib
import typing as _typing
import warnings as _warnings

from jmp_policy import optim as optim
from jmp_policy import report as report
from jmp_policy._src.api.check import LossScaleStuckError as LossScaleStuckError
from jmp_policy._src.api.check import check as check
from jmp_policy._src.api.precision import Precision as Precision
from jmp_policy._src.api.precision import from_config as from_config
from jmp_policy._src.api.wrap import register_frameworks as _register_frameworks
from jmp_policy._src.api.wrap import wrap as wrap
from jmp_policy._src.autocast.api import autocast as autocast
from jmp_policy._src.autocast.explanation import explain as explain
from jmp_policy._src.core.dtype_words import best_half_dtype as best_half_dtype
from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.core.public import publish_later as _publish_later
from jmp_policy._src.half_params.half_moments import half_moments as half_moments
from jmp_policy._src.half_params.half_weights import kahan_summation as kahan_summation
from jmp_policy._src.half_params.half_weights import master_weights as master_weights
from jmp_policy._src.half_params.half_weights import stochastic_rounding as stochastic_rounding
from jmp_policy._src.loss_scaling.accumulate import accumulate_gradients as accumulate_gradients
from jmp_policy._src.loss_scaling.gradients import all_finite as all_finite
from jmp_policy._src.loss_scaling.loss_scale import DynamicLossScale as DynamicLossScale
from jmp_policy._src.loss_scaling.loss_scale import LossScale as LossScale
from jmp_policy._src.loss_scaling.loss_scaled import loss_scaled as loss_scaled
from jmp_policy._src.loss_scaling.metrics import MetricsLogger as MetricsLogger
from jmp_policy._src.loss_scaling.metrics import grads_finite as grads_finite
from jmp_policy._src.loss_scaling.metrics import metrics as metrics
from jmp_policy._src.loss_scaling.restore import restore_state as restore_state
from jmp_policy._src.loss_scaling.scale_types import NoOpLossScale as NoOpLossScale
from jmp_policy._src.loss_scaling.scale_types import PIDLossScale as PIDLossScale
from jmp_policy._src.loss_scaling.scale_types import StaticLossScale as StaticLossScale
from jmp_policy._src.loss_scaling.scale_types import StatisticLossScale as StatisticLossScale
from jmp_policy._src.loss_scaling.selection import select_tree as select_tree
from jmp_policy._src.loss_scaling.value_and_grad import scaled_value_and_grad as scaled_value_and_grad
from jmp_policy._src.policy.patterns import PredicateOnWholePath as _PredicateOnWholePath
from jmp_policy._src.policy.policy import Policy as Policy
from jmp_policy._src.policy.regions import full_precision as full_precision
from jmp_policy._src.policy.regions import region as region
from jmp_policy._src.policy.rules import PolicyMap as PolicyMap
from jmp_policy._src.policy.rules import get_policy as get_policy
from jmp_policy._src.products.fp8.nvfp4 import rounding_key as rounding_key

__version__ = "0.2.0"

_register_frameworks(linen="jmp_policy.linen", nnx="jmp_policy.nnx")
_publish(__name__, globals(), also=[_PredicateOnWholePath])

#: Reports, which nobody needs to train a model.
_REPORTS = (
    "advise", "assert_drift", "audit", "diagnose", "drift", "gradient_spectrum", "lowering_report",
    "memory_report", "recommend", "sensitivity", "summary",
)  # fmt: skip

#: Names that lie in a module of their own since 0.2.0.
_MOVED = {
    **dict.fromkeys(
        ("HalfMomentsState", "KahanSummationState", "LossScaledState", "LossScales", "MasterWeightsState",
         "StochasticRoundingState", "check_restored", "get_loss_scale_state"),
        "optim",
    ),
    **dict.fromkeys(
        ("Audit", "Diagnosis", "Drift", "Explanation", "GradientSpectrum", "LoweringReport",
         "LoweringUnavailableError", "MemoryReport", "Operation", "Recommendation", "Sensitivity",
         "SpectrumState", "Summary", "drift_metrics", "spectrum_value_and_grad", "tap", "worthwhile"),
        "report",
    ),
}  # fmt: skip

#: What is here in place of names of other libraries.
_ELSEWHERE = {
    **dict.fromkeys(
        ("GradScaler", "LossScaleOptimizer", "DynamicScale"),
        "jmp_policy.loss_scaled(optimizer, DynamicLossScale()) and jmp_policy.scaled_value_and_grad",
    ),
    **dict.fromkeys(
        ("initialize", "set_policy", "set_global_policy", "set_dtype_policy"),
        "jmp_policy.wrap(model, 'mixed_float16')",
    ),
    **dict.fromkeys(("grad", "value_and_grad", "filter_grad"), "jmp_policy.scaled_value_and_grad"),
    "TrainState": "jmp_policy.linen.TrainState",
    "Optimizer": "jmp_policy.nnx.Optimizer",
}

if _typing.TYPE_CHECKING:
    from jmp_policy import linen as linen
    from jmp_policy import nnx as nnx
    from jmp_policy import remat_policies as remat_policies
    from jmp_policy.report import advise as advise
    from jmp_policy.report import assert_drift as assert_drift
    from jmp_policy.report import audit as audit
    from jmp_policy.report import diagnose as diagnose
    from jmp_policy.report import drift as drift
    from jmp_policy.report import gradient_spectrum as gradient_spectrum
    from jmp_policy.report import lowering_report as lowering_report
    from jmp_policy.report import memory_report as memory_report
    from jmp_policy.report import recommend as recommend
    from jmp_policy.report import sensitivity as sensitivity
    from jmp_policy.report import summary as summary
else:
    _report, __dir__ = _publish_later(__name__, globals(), {"jmp_policy._src.api.reports": _REPORTS})

    def __getattr__(name: str) -> object:
        """Imports the reports, and modules of names that few programs need, when they are first asked for."""
        if name in ("linen", "nnx", "remat_policies"):  # The first two need Flax.
            return _importlib.import_module(f"jmp_policy.{name}")
        if name in _MOVED:
            new = f"{__name__}.{_MOVED[name]}"
            _warnings.warn(
                f"{__name__}.{name} is {new}.{name} now, and will be gone from here in 0.3.0",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(_importlib.import_module(new), name)
        if name in _ELSEWHERE:
            raise AttributeError(f"module {__name__!r} has no {name!r}. Here it is {_ELSEWHERE[name]}.")
        return _report(name)
