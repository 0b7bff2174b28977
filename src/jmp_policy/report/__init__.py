"""Reports: what runs in which precision, where gradients vanish, what the compilers make of it."""

from jmp_policy.report._audit import audit as audit
from jmp_policy.report._diagnose import diagnose as diagnose
from jmp_policy.report._diagnosis import Diagnosis as Diagnosis
from jmp_policy.report._findings import Audit as Audit
from jmp_policy.report._findings import HalfOperation as HalfOperation
from jmp_policy.report._findings import Product as Product
from jmp_policy.report._findings import RepeatedCast as RepeatedCast
from jmp_policy.report._findings import Upcast as Upcast
from jmp_policy.report._formats import Format as Format
from jmp_policy.report._formats import Formats as Formats
from jmp_policy.report._formats import formats as formats
from jmp_policy.report._gpu_compiler import LoweringUnavailableError as LoweringUnavailableError
from jmp_policy.report._lowered import LoweringReport as LoweringReport
from jmp_policy.report._lowering import lowering_report as lowering_report
from jmp_policy.report._magnitudes import GradientSpectrum as GradientSpectrum
from jmp_policy.report._magnitudes import Magnitudes as Magnitudes
from jmp_policy.report._memory import MemoryReport as MemoryReport
from jmp_policy.report._memory import memory_report as memory_report
from jmp_policy.report._spectrum import SpectrumState as SpectrumState
from jmp_policy.report._spectrum import gradient_spectrum as gradient_spectrum
from jmp_policy.report._spectrum import spectrum_value_and_grad as spectrum_value_and_grad
from jmp_policy.report._summary import Summary as Summary
from jmp_policy.report._summary import summary as summary
