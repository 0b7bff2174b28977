"""What every model in PyTorch has beside its layers: batches, and the loss."""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class TorchModel:
    """The twin of a model of the zoo at one size.

    Args:
      module: without a word about precision.
      draw: `device -> (inputs, labels)`: a batch.
    """

    module: nn.Module
    draw: Callable[[torch.device], tuple[Tensor, Tensor]]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean softmax cross-entropy over all labels; `autocast` computes it in float32."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
