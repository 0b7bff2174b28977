"""Two models of the zoo in plain PyTorch, to be compared with PyTorch's own mixed precision on one card.

`MODELS["GPT-2"]("tiny")` is a `TorchModel`, in the sizes of `benchmarks.models` and with as many parameters.
"""

from benchmarks.models_torch import gpt, resnet
from benchmarks.models_torch._model import TorchModel as TorchModel
from benchmarks.models_torch._model import cross_entropy as cross_entropy

MODELS = {"ResNet-50": resnet.make, "GPT-2": gpt.make}
