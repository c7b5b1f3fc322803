"""Generation: a cache that grows token by token, on tokens that only real data know."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import autobalance

WIDTH, VOCABULARY, END = 64, 100, 99


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        keys, values = self.keys(x), self.values(x)
        if past is not None:
            keys, values = torch.cat([past[0], keys], 1), torch.cat([past[1], values], 1)
        weights = (x @ keys.transpose(1, 2)).softmax(-1)
        return x + weights @ values, (keys, values)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def generate(self, tokens: Tensor, count: int, sample: bool = False) -> Tensor:
        past: list[tuple[Tensor, Tensor] | None] = [None] * len(self.layers)
        fresh, unfinished = tokens, torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        for _ in range(count):
            x = self.embed(fresh)
            for index, layer in enumerate(self.layers):
                x, past[index] = layer(x, past[index])
            logits = self.head(x[:, -1])
            fresh = torch.multinomial(logits.softmax(-1), 1) if sample else logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, fresh], 1)
            unfinished = unfinished & (fresh[:, 0] != END)
            if not unfinished.any():
                break
        return tokens


def counted(model: Decoder, tokens: Tensor, count: int) -> int:
    device = torch.device("simulated", 0)
    gc.collect()
    before = torch.simulated.memory_allocated(device)
    torch.simulated.reset_peak_memory_stats(device)
    model.to(device)
    with torch.no_grad():
        for _ in range(2):
            moved = tokens.to(device)
            result = model.generate(moved, count)
    assert result.shape[1] == tokens.shape[1] + count, "the model stopped early: the count would be of something else"
    return torch.simulated.max_memory_allocated(device) - before


@pytest.mark.parametrize("count", [2, 12])
def test_the_growing_cache_is_counted(count: int) -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(), torch.randint(0, END, (2, 5))
    profile = autobalance.profile(
        model, tokens, training=False, step=lambda model, tokens: model.generate(tokens, count), target="simulated"
    )
    assert "choice(s) that only real data know (a token that is sampled" in profile.notes[0]
    assert profile.peak() == counted(model, tokens, count)


def test_a_model_that_fits_nowhere_generates_in_the_trial() -> None:
    with torch.device("meta"):
        model = Decoder()
    profiles = [
        autobalance.profile(
            model,
            torch.zeros(4, 8, dtype=torch.long),
            training=False,
            step=lambda model, tokens: model.generate(tokens, count, sample=True),  # noqa: B023  # called at once
            target="simulated",
        )
        for count in (40, 41)
    ]
    # One token more: keys and values of three layers, and the old keys and values of the layer that appends to them.
    # Only large tensors count here: small ones grow by steps of 512 bytes.
    assert profiles[1].peak() - profiles[0].peak() == pytest.approx((3 * 2 + 2) * 4 * WIDTH * 4, abs=1024)
