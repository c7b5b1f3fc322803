"""Peaks of stages with micro-batches in flight, against the replay of all their storage events in launch order."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.partitioning.chains.chain import Chain, Item, build_chain
from autobalance.partitioning.chains.stage_memory import StageMemory
from autobalance.partitioning.chains.stage_peaks import Reach
from autobalance.partitioning.replay import replay
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT
from autobalance.schedules.launches import in_flight, launch_order
from autobalance.timelines.micro_batches import interleaved

NOTHING: frozenset[int] = frozenset()


def _by_hand(draw: random.Random, blocks: int) -> Profile:
    def column(most: int) -> list[int]:
        return [draw.randint(0, most) for _ in range(blocks)]

    return Profile.from_costs(column(20), saved=column(20), transient=column(30), transfer=column(5)[1:], batch_size=1)


class _Residual(nn.Module):
    """Its input is needed again at the end, so that gradients meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)) for width in (32, 64, 16, 128)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x + first)


@lru_cache
def _traced(training: bool) -> Profile:
    optimizer = torch.optim.AdamW if training else None
    return autobalance.profile(_Residual(), torch.randn(64, 16), optimizer=optimizer, training=training)


def test_casts_that_micro_batches_share_are_told_once() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    profile = autobalance.profile(
        model, torch.randn(8, 256), optimizer=torch.optim.AdamW, precision="bf16-mixed", target="A100-80GB"
    )
    for schedule in ("gpipe", "1f1b"):
        stages, micro_batches = [(0, 2), (2, 4)], 8
        order = launch_order(schedule, 2, micro_batches)
        replayed = replay(interleaved(profile.timeline, 4, stages, order), [0, 0, 1, 1], 1, 2)
        chain = build_chain(profile, {}, None, free_pins=False)
        memory = StageMemory(profile.timeline, chain, 4, micro_batches, is_one_graph=schedule == "gpipe")
        held = in_flight(order, 2)
        for (start, stop), count, peak in zip(stages, held, replayed, strict=True):
            assert 0.97 * peak <= memory.peaks(NOTHING, count)[start, stop] <= peak


def _replayed_and_told(
    draw: random.Random, profile: Profile, schedule: str, fewest_cuts: int = 0
) -> tuple[list[int], list[int]]:
    """Peaks of the stages of a random split, by replay and by the matrices."""
    blocks, micro_batches = len(profile.blocks), draw.randint(2, 4)
    cuts = sorted(draw.sample(range(1, blocks), draw.randint(fewest_cuts, 3)))
    stages = list(pairwise([0, *cuts, blocks]))
    order = launch_order(schedule, len(stages), micro_batches, training=profile.training)
    assignment = [device for device, (start, stop) in enumerate(stages) for _ in range(start, stop)]
    timeline = interleaved(profile.timeline, blocks, stages, order)
    chain = build_chain(profile, {}, None, free_pins=False)
    memory = StageMemory(profile.timeline, chain, blocks, micro_batches, profile.training, schedule == "gpipe")
    told = [
        int(memory.peaks(NOTHING, held)[start, stop])
        for (start, stop), held in zip(stages, in_flight(order, len(stages)), strict=True)
    ]
    return replay(timeline, assignment, assignment[-1], len(stages)), told


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(20))
def test_stages_by_hand_peak_exactly_as_their_replay_with_all_that_is_in_flight(seed: int, schedule: str) -> None:
    draw = random.Random(seed)
    replayed, told = _replayed_and_told(draw, _by_hand(draw, 6), schedule)
    assert told == replayed


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_traced_stages_never_peak_below_what_is_told_and_hardly_above(schedule: str, training: bool) -> None:
    for seed in range(8):
        replayed, told = _replayed_and_told(random.Random(seed), _traced(training), schedule, 1)
        for device, (peak, least) in enumerate(zip(replayed, told, strict=True)):
            assert 0.97 * peak <= least <= peak, (seed, device)


def test_a_table_has_the_entries_of_the_matrix_by_length() -> None:
    profile = _by_hand(random.Random(1), 5)
    chain = build_chain(profile, {}, None, free_pins=False)
    memory = StageMemory(profile.timeline, chain, 5, micro_batches=4)
    for held in (1, 2, 4):
        matrix, table = memory.peaks(NOTHING, held), memory.banded(NOTHING, held, width=3)
        for start in range(5):
            expected = [int(matrix[start, stop]) if stop <= 5 else 0 for stop in range(start + 1, start + 4)]
            assert table[start].tolist() == expected


def test_a_device_with_nothing_but_an_item_holds_the_item() -> None:
    profile = Profile.from_costs([1, 2, 4, 8], transient=[0, 16, 0, 32])
    chain = Chain(((1,), (2,)), (Item((0, 3, ROOT), None),), {})
    memory = StageMemory(profile.timeline, chain, 4)
    assert memory.empty(NOTHING) == 0
    assert memory.empty(frozenset({0})) == 1 + 8 + 32
    assert memory.peaks(frozenset({0}))[0, 1] == 1 + 2 + 8 + 32
    assert memory.peaks(NOTHING)[0, 2] == 2 + 4 + 16


def test_stages_within_reach_are_as_without_one() -> None:
    profile = _by_hand(random.Random(2), 6)
    chain = build_chain(profile, {}, None, free_pins=False)
    reach = Reach.of([2, 4, 4, 6, 6, 6])
    near = StageMemory(profile.timeline, chain, 6, micro_batches=3, reach=reach).peaks(NOTHING, 2)
    everything = StageMemory(profile.timeline, chain, 6, micro_batches=3).peaks(NOTHING, 2)
    inside = [(start, stop) for start in range(6) for stop in range(start + 1, reach.last[start] + 1)]
    assert all(near[at] == everything[at] for at in inside)
