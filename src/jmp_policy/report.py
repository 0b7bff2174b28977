"""Reports what runs in which precision, where gradients vanish, and what the compilers make of a program."""

import typing as _typing

from jmp_policy._src.core.public import publish_later as _publish_later

if _typing.TYPE_CHECKING:
    from jmp_policy._src.api.reports import Audit as Audit
    from jmp_policy._src.api.reports import Diagnosis as Diagnosis
    from jmp_policy._src.api.reports import Drift as Drift
    from jmp_policy._src.api.reports import DriftRow as DriftRow
    from jmp_policy._src.api.reports import Estimate as Estimate
    from jmp_policy._src.api.reports import Format as Format
    from jmp_policy._src.api.reports import Formats as Formats
    from jmp_policy._src.api.reports import GradientSpectrum as GradientSpectrum
    from jmp_policy._src.api.reports import HalfOperation as HalfOperation
    from jmp_policy._src.api.reports import Kernel as Kernel
    from jmp_policy._src.api.reports import LostConstant as LostConstant
    from jmp_policy._src.api.reports import LoweringReport as LoweringReport
    from jmp_policy._src.api.reports import LoweringUnavailableError as LoweringUnavailableError
    from jmp_policy._src.api.reports import Magnitudes as Magnitudes
    from jmp_policy._src.api.reports import MemoryReport as MemoryReport
    from jmp_policy._src.api.reports import MemoryRow as MemoryRow
    from jmp_policy._src.api.reports import ModuleRow as ModuleRow
    from jmp_policy._src.api.reports import Operand as Operand
    from jmp_policy._src.api.reports import Product as Product
    from jmp_policy._src.api.reports import Recommendation as Recommendation
    from jmp_policy._src.api.reports import RecommendationRow as RecommendationRow
    from jmp_policy._src.api.reports import RepeatedCast as RepeatedCast
    from jmp_policy._src.api.reports import ResultDrift as ResultDrift
    from jmp_policy._src.api.reports import Sensitivity as Sensitivity
    from jmp_policy._src.api.reports import SensitivityRow as SensitivityRow
    from jmp_policy._src.api.reports import Share as Share
    from jmp_policy._src.api.reports import SpectrumState as SpectrumState
    from jmp_policy._src.api.reports import Summary as Summary
    from jmp_policy._src.api.reports import Upcast as Upcast
    from jmp_policy._src.api.reports import Zero as Zero
    from jmp_policy._src.api.reports import assert_drift as assert_drift
    from jmp_policy._src.api.reports import audit as audit
    from jmp_policy._src.api.reports import diagnose as diagnose
    from jmp_policy._src.api.reports import drift as drift
    from jmp_policy._src.api.reports import drift_metrics as drift_metrics
    from jmp_policy._src.api.reports import formats as formats
    from jmp_policy._src.api.reports import gradient_spectrum as gradient_spectrum
    from jmp_policy._src.api.reports import lowering_report as lowering_report
    from jmp_policy._src.api.reports import memory_report as memory_report
    from jmp_policy._src.api.reports import recommend as recommend
    from jmp_policy._src.api.reports import sensitivity as sensitivity
    from jmp_policy._src.api.reports import spectrum_value_and_grad as spectrum_value_and_grad
    from jmp_policy._src.api.reports import summary as summary
else:
    __getattr__, __dir__ = _publish_later(__name__, globals(), "jmp_policy._src.api.reports")
