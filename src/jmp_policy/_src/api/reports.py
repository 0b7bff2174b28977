"""The reports, and all that they return, under their public names."""

from jmp_policy._src.report.audit import audit
from jmp_policy._src.report.audit_findings import Audit, HalfOperation, Product, Upcast
from jmp_policy._src.report.diagnose import diagnose
from jmp_policy._src.report.diagnosis import Diagnosis, Operand, Zero
from jmp_policy._src.report.drift.drift import assert_drift, drift, drift_metrics
from jmp_policy._src.report.drift.findings import Drift, DriftRow, ResultDrift
from jmp_policy._src.report.formats import Format, Formats, formats
from jmp_policy._src.report.lost_constants import LostConstant
from jmp_policy._src.report.lowering.compiler import LoweringUnavailableError
from jmp_policy._src.report.lowering.kernels import Estimate, Kernel
from jmp_policy._src.report.lowering.lowered import LoweringReport
from jmp_policy._src.report.lowering.lowering import lowering_report
from jmp_policy._src.report.lowering.memory import MemoryReport, MemoryRow, memory_report
from jmp_policy._src.report.sensitivity.chosen_modules import RecommendationRow
from jmp_policy._src.report.sensitivity.recommend import Recommendation, recommend
from jmp_policy._src.report.sensitivity.sensitivity import Sensitivity, SensitivityRow, sensitivity
from jmp_policy._src.report.spectrum.advice import Advice, Change, advise
from jmp_policy._src.report.spectrum.magnitudes import GradientSpectrum, Magnitudes, Share
from jmp_policy._src.report.spectrum.spectrum import SpectrumState, gradient_spectrum, spectrum_value_and_grad
from jmp_policy._src.report.summary import ModuleRow, Summary, summary
from jmp_policy._src.report.trials import Tried

__all__ = [
    "Advice", "Audit", "Change", "Diagnosis", "Drift", "DriftRow", "Estimate", "Format", "Formats",
    "GradientSpectrum", "HalfOperation", "Kernel", "LostConstant", "LoweringReport",
    "LoweringUnavailableError", "Magnitudes", "MemoryReport", "MemoryRow", "ModuleRow", "Operand",
    "Product", "Recommendation", "RecommendationRow", "ResultDrift", "Sensitivity",
    "SensitivityRow", "Share", "SpectrumState", "Summary", "Tried", "Upcast", "Zero", "advise",
    "assert_drift", "audit", "diagnose", "drift", "drift_metrics", "formats", "gradient_spectrum",
    "lowering_report", "memory_report", "recommend", "sensitivity", "spectrum_value_and_grad", "summary",
]  # fmt: skip
