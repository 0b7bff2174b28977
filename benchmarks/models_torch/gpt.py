"""GPT-2 in PyTorch: the twin of `benchmarks.models.gpt`, with its sizes."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.models import gpt
from benchmarks.models_torch._model import TorchModel


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


def make(size: str) -> TorchModel:
    """GPT-2 at the sizes of its twin."""
    twin = gpt.make(size)
    like, batch = twin.module, twin.shapes()[1].shape[0]

    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(like.vocabulary, (batch, like.length + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]

    return TorchModel(GPT(like), draw)
