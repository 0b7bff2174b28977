"""Real architectures in plain Flax, with no precision code in them: what is measured against.

`MODELS["ResNet-50"]("tiny")` is a `Model`: a Linen module with batches and a loss. Sizes: "tiny" for tests,
"small" for a CPU, "full" as published.
"""

from benchmarks.models import resnet
from benchmarks.models._model import SIZES as SIZES
from benchmarks.models._model import Model as Model

MODELS = {
    "ResNet-50": resnet.make,
}
