from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autobalance.blocks import find_blocks
from autobalance.partitioning.replay import replay
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch, PlainTrial
from autobalance.timelines.splice import repeated

WIDTH, TIME = 8, 6


class Layer(nn.Module):
    """Attention-like mixing under a mask, then a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, value = self.mix(self.norm(x)).chunk(2, -1)
        weights = (query @ query.transpose(-1, -2)).masked_fill(mask, -1e9).softmax(-1)
        x = x + weights @ value
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, depth: int, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mask", torch.ones(TIME, TIME, dtype=torch.bool).triu(1))
        self.recompute = recompute

    def self_balance(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = checkpoint(layer, x, self.mask, use_reentrant=False) if self.recompute else layer(x, self.mask)
        return self.head(x)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW for-loop": partial(torch.optim.AdamW, foreach=False),
    "SGD": partial(torch.optim.SGD, lr=0.1, foreach=True),
    "momentum for-loop": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
}


@cache
def profile_of(depth: int, optimizer: str, precision: str = "32-true", recompute: bool = False) -> Profile:
    return profile_of_model(Stack(depth, recompute), optimizer, precision)


def profile_of_model(model: nn.Module, optimizer: str, precision: str = "32-true") -> Profile:
    trial = PlainTrial(OPTIMIZERS[optimizer], lambda module, tokens: module(tokens).sum(), precision)
    return Profiler(
        model, find_blocks(model), trial, [Batch("batch", "train", torch.zeros(2, TIME, dtype=torch.long))]
    ).profile()


def memory_of(profile: Profile) -> list[BlockCost]:
    """Rows but for the share of the optimizer's time, in which launches for all blocks are divided among them."""
    return [replace(block, optimizer_time=0.0) for block in profile.blocks]


class Halves(Layer):
    """Gives on its output as two halves, each of which the next one is given by itself."""

    def forward(self, x: Tensor, mask: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        left, right = super().forward(x if other is None else torch.cat([x, other], -1), mask).chunk(2, -1)
        return left, right


class StackOfHalves(Stack):
    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.layers = nn.ModuleList(Halves() for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        halves: tuple[Tensor, ...] = (self.embed(tokens) * self.scale).chunk(2, -1)
        for layer in self.layers:
            halves = layer(halves[0], self.mask, halves[1])
        return self.head(torch.cat(halves, -1))


RUNS = [
    *((name, "32-true", False) for name in OPTIMIZERS),
    ("AdamW foreach", "bf16-mixed", False),
    ("SGD", "32-true", True),
    ("AdamW foreach", "bf16-mixed", True),
]


@pytest.mark.parametrize(("optimizer", "precision", "recompute"), RUNS)
def test_a_spliced_profile_equals_the_trace_of_the_deep_model(optimizer: str, precision: str, recompute: bool) -> None:
    deep = profile_of(8, optimizer, precision, recompute)
    spliced = repeated(profile_of(3, optimizer, precision, recompute), "layers.1", 5)
    assert spliced.names == deep.names
    assert memory_of(spliced) == memory_of(deep)
    assert spliced.loose == deep.loose
    for step in (1, 2):
        for phase in ("forward+backward", "optimizer"):
            assert spliced.peak(step, phase=phase) == deep.peak(step, phase=phase)
    assert spliced.peak(reserved=True) == deep.peak(reserved=True)
    count = len(deep.blocks)
    for start in range(count):  # every contiguous stage, on device 1
        for stop in range(start + 1, count + 1):
            where = [int(start <= block < stop) for block in range(count)]
            assert replay(spliced.timeline, where, where[-1], 2) == replay(deep.timeline, where, where[-1], 2)
    draw = random.Random(0)
    for _ in range(20):
        where = [draw.randrange(3) for _ in range(count)]
        assert replay(spliced.timeline, where, where[-1], 3) == replay(deep.timeline, where, where[-1], 3)


def test_copies_of_parts_stay_views_of_what_they_are_parts_of() -> None:
    deep = profile_of_model(StackOfHalves(8), "AdamW foreach")
    spliced = repeated(profile_of_model(StackOfHalves(4), "AdamW foreach"), "layers.1", 4)
    assert max(spliced.timeline.wholes) >= 0
    draw = random.Random(0)
    for _ in range(60):
        where = [draw.randrange(3) for _ in deep.blocks]
        assert replay(spliced.timeline, where, where[-1], 3) == replay(deep.timeline, where, where[-1], 3)


def test_any_layer_in_the_middle_can_be_repeated_and_the_rest_is_numbered_on() -> None:
    deep = profile_of(8, "SGD")
    for name in ("layers.1", "layers.2", "layers.3"):
        spliced = repeated(profile_of(5, "SGD"), name, 3)
        assert spliced.names == deep.names
        assert spliced.peak() == deep.peak()


def test_a_spliced_profile_can_be_spliced_again_and_says_so() -> None:
    twice = repeated(repeated(profile_of(3, "SGD"), "layers.1", 2), "layers.2", 3)
    assert twice.peak() == profile_of(8, "SGD").peak()
    assert twice.notes == (
        "2 more of layers.1 were not traced: they are taken to be like it",
        "3 more of layers.2 were not traced: they are taken to be like it",
    )


def test_no_more_of_it_changes_nothing() -> None:
    profile = profile_of(3, "SGD")
    assert repeated(profile, "layers.1", 0) is profile


def test_exact_bytes_and_scratch_come_along() -> None:
    spliced, deep = repeated(profile_of(3, "SGD"), "layers.1", 5).timeline, profile_of(8, "SGD").timeline
    assert sorted(spliced.fixed) == sorted(deep.fixed)
    assert len(spliced.scratch) == len(deep.scratch)


@pytest.mark.parametrize(
    ("block", "times", "text"),
    [
        ("layers.7", 1, "has no block 'layers.7'; it has embed, layers.0"),
        ("layers.1", -1, "times=-1; a block can be repeated 0 times or more"),
        ("embed", 1, "'embed' has no block before or after it; three equal blocks in a row are needed"),
        (
            "layers.0",
            1,
            "'layers.0' cannot be repeated: the block and the one after it do not hold the same",
        ),
    ],
)
def test_what_cannot_be_repeated_is_refused(block: str, times: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        repeated(profile_of(3, "SGD"), block, times)


class Summed(Stack):
    """The head reads all layers' outputs, of which a deeper model has more."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, kept = self.embed(tokens) * self.scale, []
        for layer in self.layers:
            x = layer(x, self.mask)
            kept.append(x)
        return self.head(torch.cat(kept, 1))


class Tied(Stack):
    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        for layer in self.layers:
            layer.up = self.layers[0].up


@pytest.mark.parametrize(
    ("model", "text"), [(Summed, "shares a tensor with|nothing like it|their gradients meet"), (Tied, "share a device")]
)
def test_layers_that_reach_beyond_their_neighbours_are_refused(model: Any, text: str) -> None:
    profile = profile_of_model(model(5), "SGD")
    with pytest.raises(ValueError, match=text):
        repeated(profile, "layers.2", 3)


def test_gradients_and_casts_are_those_of_the_deep_model() -> None:
    deep, fresh = (
        repeated(profile_of(3, "SGD", "bf16-mixed"), "layers.1", 3),
        profile_of(6, "SGD", "bf16-mixed"),
    )
    assert fresh.timeline.casts
    assert set(deep.timeline.gradients) == set(fresh.timeline.gradients)
    assert set(deep.timeline.casts) == set(fresh.timeline.casts)
