"""Shapes of large language models, built on meta: they take no memory, and profiling them needs none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        layers, width, heads, hidden, vocabulary: of the decoder; `hidden` is the width of its feed-forward part.
        gated: as Llama has it (RMS norm, SwiGLU, no biases), else as BLOOM has it.
        tokens: in the batch of one sequence.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    gated: bool
    tokens: int = 2048


SHAPES = {
    # Touvron et al.: "LLaMA: Open and Efficient Foundation Language Models", 2023, table 2
    "Llama-7B": Shape(32, 4096, 32, 11008, 32000, gated=True),
    # BigScience: "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model", 2022, table 3
    "BLOOM-176B": Shape(70, 14336, 112, 4 * 14336, 250880, gated=False),
}


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, bias = shape.width, not shape.gated
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.heads = shape.heads
        self.before_attention, self.before_hidden = norm(width), norm(width)
        self.project = nn.Linear(width, 3 * width, bias)
        self.out = nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, shape.hidden, bias), nn.Linear(shape.hidden, width, bias)
        self.gate = nn.Linear(width, shape.hidden, bias) if shape.gated else None

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.project(self.before_attention(x)).chunk(3, -1)
        query, key, value = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        y = self.before_hidden(x)
        raised = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(raised)


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def self_balance(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.norm, self.head]

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def build(shape: Shape) -> tuple[Decoder, tuple[Tensor, Tensor]]:
    """The model on meta, and a batch."""
    with torch.device("meta"):
        model = Decoder(shape)
    tokens = torch.randint(0, shape.vocabulary, (1, shape.tokens), generator=torch.Generator().manual_seed(0))
    return model, (tokens, tokens.roll(-1, 1))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The step of these models."""
    value: Tensor = model(*batch)
    return value
