"""Two models of the zoo in plain PyTorch, to be compared with PyTorch's own mixed precision on one card.

`MODELS["GPT-2"]("tiny")` is a `TorchModel`, in the sizes of `benchmarks.models` and with as many parameters.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.models import gpt, resnet


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


class Layer(nn.Module):
    """Attention by PyTorch's own kernels and a feed-forward network, each normalised before and added."""

    def __init__(self, hidden: int, heads: int, mlp: int):
        super().__init__()
        self.heads = heads
        self.norm_0, self.norm_1 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.projections, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.inner, self.outer = nn.Linear(hidden, mlp), nn.Linear(mlp, hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.projections(self.norm_0(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.outer(F.gelu(self.inner(self.norm_1(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens `[B, L]` to logits `[B, L, vocabulary]`, whose weights are those of the embedding."""

    def __init__(self, like: gpt.GPT):
        super().__init__()
        self.tokens = nn.Embedding(like.vocabulary, like.hidden)
        self.positions = nn.Embedding(like.length, like.hidden)
        layers = (Layer(like.hidden, like.heads, like.mlp) for _ in range(like.layers))
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(like.hidden)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
            if isinstance(part, nn.Linear):
                nn.init.zeros_(part.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.layers(self.tokens(tokens) + self.positions(places))
        return F.linear(self.norm(x), self.tokens.weight)


def make_gpt(size: str) -> TorchModel:
    """GPT-2 at the sizes of its twin."""
    twin = gpt.make(size)
    like, batch = twin.module, twin.shapes()[1].shape[0]

    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(like.vocabulary, (batch, like.length + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]

    return TorchModel(GPT(like), draw)


def conv(features: int, width: int, window: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(features, width, window, stride, padding=window // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the 3x3 one has the stride."""

    def __init__(self, features: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *(conv(features, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)),
        )
        nn.init.zeros_(self.body[-1].weight)
        self.shortcut = nn.Identity()
        if stride > 1 or features != 4 * width:
            self.shortcut = nn.Sequential(conv(features, 4 * width, 1, stride), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Images `[B, 3, H, W]` to logits `[B, classes]`."""

    def __init__(self, like: resnet.ResNet):
        super().__init__()
        layers = [conv(3, like.width, 7, 2), nn.BatchNorm2d(like.width), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(3, 2, padding=1))
        features = like.width
        for stage, blocks in enumerate(like.blocks):
            width = like.width * 2**stage
            for block in range(blocks):
                layers.append(Bottleneck(features, width, 2 if stage > 0 and block == 0 else 1))
                features = 4 * width
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(features, like.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def make_resnet(size: str) -> TorchModel:
    """ResNet-50 at the sizes of its twin; channels come last in memory, as Tensor Cores want them."""
    twin = resnet.make(size)
    (images,), _ = twin.shapes()
    batch, side, _, channels = images.shape

    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randn((batch, channels, side, side), device=device)
        labels = torch.randint(twin.module.classes, (batch,), device=device)
        return x.to(memory_format=torch.channels_last), labels

    return TorchModel(ResNet(twin.module).to(memory_format=torch.channels_last), draw)


MODELS = {"ResNet-50": make_resnet, "GPT-2": make_gpt}
