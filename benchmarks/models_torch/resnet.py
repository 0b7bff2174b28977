"""ResNet-50 in PyTorch: the twin of `benchmarks.models.resnet`, with its sizes."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.models import resnet
from benchmarks.models_torch._model import TorchModel


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


def make(size: str) -> TorchModel:
    """ResNet-50 at the sizes of its twin; channels come last in memory, as Tensor Cores want them."""
    twin = resnet.make(size)
    (images,), _ = twin.shapes()
    batch, side, _, channels = images.shape

    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randn((batch, channels, side, side), device=device)
        labels = torch.randint(twin.module.classes, (batch,), device=device)
        return x.to(memory_format=torch.channels_last), labels

    return TorchModel(ResNet(twin.module).to(memory_format=torch.channels_last), draw)
