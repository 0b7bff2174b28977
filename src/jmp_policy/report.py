"""Reports what runs in which precision, where gradients vanish, and what the compilers make of a program."""

import typing as _typing

from jmp_policy._src.autocast.explanation import Explanation as Explanation
from jmp_policy._src.autocast.explanation import Operation as Operation
from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.core.public import publish_later as _publish_later
from jmp_policy._src.policy.watching import tap as tap
from jmp_policy._src.policy.worthwhile import worthwhile as worthwhile

_publish(__name__, globals())

if _typing.TYPE_CHECKING:
    from jmp_policy._src.report.audit import audit as audit
    from jmp_policy._src.report.audit_findings import Audit as Audit
    from jmp_policy._src.report.audit_findings import HalfOperation as HalfOperation
    from jmp_policy._src.report.audit_findings import Product as Product
    from jmp_policy._src.report.audit_findings import RepeatedCast as RepeatedCast
    from jmp_policy._src.report.audit_findings import Upcast as Upcast
    from jmp_policy._src.report.diagnose import diagnose as diagnose
    from jmp_policy._src.report.diagnosis import Diagnosis as Diagnosis
    from jmp_policy._src.report.diagnosis import Operand as Operand
    from jmp_policy._src.report.diagnosis import Zero as Zero
    from jmp_policy._src.report.drift.drift import assert_drift as assert_drift
    from jmp_policy._src.report.drift.drift import drift as drift
    from jmp_policy._src.report.drift.drift import drift_metrics as drift_metrics
    from jmp_policy._src.report.drift.findings import Drift as Drift
    from jmp_policy._src.report.drift.findings import DriftRow as DriftRow
    from jmp_policy._src.report.drift.findings import ResultDrift as ResultDrift
    from jmp_policy._src.report.formats import Format as Format
    from jmp_policy._src.report.formats import Formats as Formats
    from jmp_policy._src.report.formats import formats as formats
    from jmp_policy._src.report.lost_constants import LostConstant as LostConstant
    from jmp_policy._src.report.lowering.compiler import LoweringUnavailableError as LoweringUnavailableError
    from jmp_policy._src.report.lowering.kernels import Kernel as Kernel
    from jmp_policy._src.report.lowering.lowered import LoweringReport as LoweringReport
    from jmp_policy._src.report.lowering.lowering import lowering_report as lowering_report
    from jmp_policy._src.report.lowering.memory import MemoryReport as MemoryReport
    from jmp_policy._src.report.lowering.memory import MemoryRow as MemoryRow
    from jmp_policy._src.report.lowering.memory import memory_report as memory_report
    from jmp_policy._src.report.lowering.roofline import Estimate as Estimate
    from jmp_policy._src.report.sensitivity.chosen_modules import RecommendationRow as RecommendationRow
    from jmp_policy._src.report.sensitivity.recommend import Recommendation as Recommendation
    from jmp_policy._src.report.sensitivity.recommend import recommend as recommend
    from jmp_policy._src.report.sensitivity.sensitivity import Sensitivity as Sensitivity
    from jmp_policy._src.report.sensitivity.sensitivity import SensitivityRow as SensitivityRow
    from jmp_policy._src.report.sensitivity.sensitivity import sensitivity as sensitivity
    from jmp_policy._src.report.spectrum.magnitudes import GradientSpectrum as GradientSpectrum
    from jmp_policy._src.report.spectrum.magnitudes import Magnitudes as Magnitudes
    from jmp_policy._src.report.spectrum.magnitudes import Share as Share
    from jmp_policy._src.report.spectrum.spectrum import SpectrumState as SpectrumState
    from jmp_policy._src.report.spectrum.spectrum import gradient_spectrum as gradient_spectrum
    from jmp_policy._src.report.spectrum.spectrum import spectrum_value_and_grad as spectrum_value_and_grad
    from jmp_policy._src.report.summary import ModuleRow as ModuleRow
    from jmp_policy._src.report.summary import Summary as Summary
    from jmp_policy._src.report.summary import summary as summary
    from jmp_policy._src.report.trials import Tried as Tried
else:
    __getattr__, __dir__ = _publish_later(__name__, globals(), {"jmp_policy._src.api.reports": None})
