"""Wraps optax transformations: unscales gradients, tests them, and updates or skips the step.

The states are here too, with what reads and restores them; a training script needs `jmp_policy` alone.
"""

from jmp_policy._src.core.public import publish as _publish
from jmp_policy._src.half_params.half_moments import HalfMomentsState as HalfMomentsState
from jmp_policy._src.half_params.half_weights import KahanSummationState as KahanSummationState
from jmp_policy._src.half_params.half_weights import MasterWeightsState as MasterWeightsState
from jmp_policy._src.half_params.half_weights import StochasticRoundingState as StochasticRoundingState
from jmp_policy._src.loss_scaling.loss_scaled import loss_scaled as loss_scaled
from jmp_policy._src.loss_scaling.loss_scales import LossScales as LossScales
from jmp_policy._src.loss_scaling.metrics import get_loss_scale_state as get_loss_scale_state
from jmp_policy._src.loss_scaling.restore import check_restored as check_restored
from jmp_policy._src.loss_scaling.state import LossScaledState as LossScaledState

_publish(__name__, globals())
