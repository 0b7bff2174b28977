"""Mixed-precision training for JAX and Flax: policies, loss scaling, and proof of both.

Three changed lines turn a float32 training step into a mixed-precision one::

    model = jmp_policy.wrap(Net(), "mixed_float16")
    tx = jmp_policy.loss_scaled(optax.adamw(1e-3), jmp_policy.DynamicLossScale())
    loss, grads = jmp_policy.scaled_value_and_grad(loss_fn)(opt_state, params)
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from jmp_policy._accumulate import accumulate_gradients as accumulate_gradients
from jmp_policy._adaptive_scale import PIDLossScale as PIDLossScale
from jmp_policy._adaptive_scale import StatisticLossScale as StatisticLossScale
from jmp_policy._autocast._explain import Explanation as Explanation
from jmp_policy._autocast._explain import Operation as Operation
from jmp_policy._autocast._explain import explain as explain
from jmp_policy._autocast._interpreter import autocast as autocast
from jmp_policy._check import LossScaleStuckError as LossScaleStuckError
from jmp_policy._check import check as check
from jmp_policy._dtypes import best_half_dtype as best_half_dtype
from jmp_policy._finite import all_finite as all_finite
from jmp_policy._finite import select_tree as select_tree
from jmp_policy._grad import scaled_value_and_grad as scaled_value_and_grad
from jmp_policy._kahan_summation import KahanSummationState as KahanSummationState
from jmp_policy._kahan_summation import kahan_summation as kahan_summation
from jmp_policy._logger import MetricsLogger as MetricsLogger
from jmp_policy._loss_scale import DynamicLossScale as DynamicLossScale
from jmp_policy._loss_scale import LossScale as LossScale
from jmp_policy._loss_scale import NoOpLossScale as NoOpLossScale
from jmp_policy._loss_scale import StaticLossScale as StaticLossScale
from jmp_policy._loss_scales import LossScales as LossScales
from jmp_policy._master_weights import MasterWeightsState as MasterWeightsState
from jmp_policy._master_weights import master_weights as master_weights
from jmp_policy._metrics import grads_finite as grads_finite
from jmp_policy._metrics import metrics as metrics
from jmp_policy._policy import Policy as Policy
from jmp_policy._policy import get_policy as get_policy
from jmp_policy._regions import full_precision as full_precision
from jmp_policy._regions import region as region
from jmp_policy._restore import check_restored as check_restored
from jmp_policy._restore import restore_state as restore_state
from jmp_policy._rules import PolicyMap as PolicyMap
from jmp_policy._state import LossScaledState as LossScaledState
from jmp_policy._state import get_loss_scale_state as get_loss_scale_state
from jmp_policy._stochastic_rounding import StochasticRoundingState as StochasticRoundingState
from jmp_policy._stochastic_rounding import stochastic_rounding as stochastic_rounding
from jmp_policy._taps import tap as tap
from jmp_policy._wrap import wrap as wrap
from jmp_policy.optim import loss_scaled as loss_scaled
from jmp_policy.report import Audit as Audit
from jmp_policy.report import Diagnosis as Diagnosis
from jmp_policy.report import GradientSpectrum as GradientSpectrum
from jmp_policy.report import LoweringReport as LoweringReport
from jmp_policy.report import LoweringUnavailableError as LoweringUnavailableError
from jmp_policy.report import MemoryReport as MemoryReport
from jmp_policy.report import SpectrumState as SpectrumState
from jmp_policy.report import Summary as Summary
from jmp_policy.report import audit as audit
from jmp_policy.report import diagnose as diagnose
from jmp_policy.report import gradient_spectrum as gradient_spectrum
from jmp_policy.report import lowering_report as lowering_report
from jmp_policy.report import memory_report as memory_report
from jmp_policy.report import spectrum_value_and_grad as spectrum_value_and_grad
from jmp_policy.report import summary as summary

__version__ = "0.1.0"

if _TYPE_CHECKING:
    from jmp_policy import linen as linen
    from jmp_policy import nnx as nnx


def __getattr__(name: str) -> object:
    """`jmp_policy.linen` and `jmp_policy.nnx` need Flax, and are imported when they are first asked for."""
    if name in ("linen", "nnx"):
        return _importlib.import_module(f"jmp_policy.{name}")
    raise AttributeError(f"module 'jmp_policy' has no attribute {name!r}")
