"""Gradients of one tensor meet where the blocks are that it went to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.blocks import find_blocks
from autobalance.partitioning.replay import replay
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.timeline import Timeline
from autobalance.profiling.trial import Batch, PlainTrial
from autobalance.timelines.fans import Arrival, Fan
from autobalance.timelines.meeting import as_met, least
from tests.profiling.running import spot

# A tensor of 10 bytes that block 0 makes (storage 0) goes to blocks 1, 2 and 3 (storages 1 to 3). Gradients: of block
# 3 (4, copied to 5), of block 2 (6, copied to 7), of block 1 (9, copied to 10); their sums are 8 and 11.
OWNERS = (0, 1, 2, 3, 3, 0, 2, 0, 0, 1, 0, 0)
VALUES = (0, 0, 0, 0, 1, 1, 2, 2, -1, 3, 3, -1)
EVENTS = (
    *(1, 2, 3, 4),
    *(5, -4, 6, -5),
    *(7, -3, 8, -7, 9, -6, -8),
    *(10, -2, 11, -10, 12, -9, -11),
    *(-1, -12),
)
APART = Timeline(
    (10,) * 12,
    OWNERS,
    VALUES,
    EVENTS,
    fans=(
        Fan(
            (
                Arrival(brought=5, given=3, terms=(4,), sums=(-1,)),
                Arrival(brought=7, added=8, given=2, terms=(6,), sums=(-1,)),
                Arrival(brought=10, added=11, given=1, terms=(9,), sums=(-1,)),
            )
        ),
    ),
)
# The same where autograd adds in place: the first copy stays, and no sums are made.
IN_PLACE = Timeline(
    (10,) * 12,
    OWNERS,
    VALUES,
    (*(1, 2, 3, 4), *(5, -4, 6, -5), *(7, -3, 8, -7, -8), *(10, -2, 11, -10, -11), *(-1, -6)),
    fans=(
        Fan(
            (
                Arrival(brought=5, given=3, terms=(4,), sums=(-1,)),
                Arrival(brought=7, given=2, terms=(6,), sums=(-1,)),
                Arrival(brought=10, given=1, terms=(9,), sums=(-1,)),
            )
        ),
    ),
)


@pytest.mark.parametrize(
    ("timeline", "assignment", "peaks"),
    [
        # Tensor, sum so far, copy and new sum on device 0; a copy of the tensor and a gradient on the others.
        (APART, (0, 1, 2, 3), [40, 20, 20, 20]),
        # Device 1 has its copy, the gradient of 3, and that of 2; the tensor is gone when both are added.
        (APART, (0, 2, 1, 1), [40, 30, 20]),
        # It is still there when those of 3 and 2 are added; device 0 is given one copy of the sum of all.
        (APART, (0, 1, 1, 1), [20, 40]),
        # The gradient of 1 is made where it is added to the copy of what 3 and 2 add.
        (APART, (0, 0, 1, 1), [40, 30]),
        # That of 2 is there first.
        (APART, (0, 1, 0, 1), [40, 30]),
        (APART, (0, 0, 0, 0), [40]),
        (IN_PLACE, (0, 1, 2, 3), [30, 20, 20, 20]),
        (IN_PLACE, (0, 2, 1, 1), [30, 30, 20]),
        (IN_PLACE, (0, 1, 1, 1), [20, 30]),
        (IN_PLACE, (0, 0, 1, 1), [30, 30]),
        (IN_PLACE, (0, 0, 0, 0), [30]),
    ],
)
def test_gradients_of_a_shared_copy_are_added_where_it_is(
    timeline: Timeline, assignment: Sequence[int], peaks: list[int]
) -> None:
    assert replay(timeline, assignment, root=0, devices=len(peaks)) == peaks


def test_blocks_that_share_no_copy_send_their_gradients_one_by_one() -> None:
    # Block 2 is given the tensor only after block 3 has released its copy, so that each gets one of its own.
    events = (1, 4, 5, -4, 6, -5, 3, 7, -3, 8, -7, 9, -6, -8, 2, 10, -2, 11, -10, 12, -9, -11, -1, -12)
    timeline = Timeline((10,) * 12, OWNERS, VALUES, events, fans=APART.fans)
    assert replay(timeline, (0, 2, 1, 1), root=0, devices=3) == [40, 20, 20]


def test_nothing_changes_where_every_block_is_apart() -> None:
    homes = APART.homes((0, 1, 2, 3), root=0)
    assert as_met(APART, homes) == (APART, homes)


def test_marks_stay_at_their_events() -> None:
    marks = (("step 1 forward", 0), ("step 1 backward", 4), ("step 1 end", len(EVENTS)))
    timeline = Timeline((10,) * 12, OWNERS, VALUES, EVENTS, marks=marks, emptied=(4,), fans=APART.fans)
    met, homes = as_met(timeline, timeline.homes((0, 1, 1, 1), root=0))
    assert met.marks[:2] == marks[:2]
    assert met.marks[2] == ("step 1 end", len(met.events))
    assert met.emptied == (4,)
    assert met.peaks(homes, 2, 0, 4) == [10, 10]


class Layer(nn.Module):
    """Attends to a tensor that all layers are given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        weights = torch.softmax(self.query(x) @ self.key(memory).transpose(-1, -2), -1)
        attended: Tensor = weights @ self.value(memory)
        return x + attended


class EncoderAndDecoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, width)

    def self_balance(self) -> list[nn.Module]:
        return [self.encoder, *self.layers, self.head]

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        for layer in self.layers:
            x = layer(x, memory)
        out: Tensor = self.head(x)
        return out


def loss(model: Any, batch: Tensor) -> Tensor:
    total: Tensor = model(batch).square().sum()
    return total


def placements(blocks: int, devices: int) -> Iterator[tuple[int, ...]]:
    """All that differ in more than the numbers of the devices."""
    if not blocks:
        yield ()
        return
    for earlier in placements(blocks - 1, devices):
        for device in range(min(max(earlier, default=-1) + 2, devices)):
            yield (*earlier, device)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, foreach=False),
}


@pytest.fixture(scope="module", params=OPTIMIZERS)
def profiled(request: pytest.FixtureRequest) -> tuple[Profiler, Profile, int]:
    model = EncoderAndDecoder()
    trial = PlainTrial(OPTIMIZERS[request.param], loss, "32-true")
    profiler = Profiler(model, find_blocks(model), trial, [Batch("train batch", "train", torch.randn(20, 16, 32))])
    return profiler, profiler.profile(), list(OPTIMIZERS).index(request.param)


def test_a_decoder_replays_as_placed_wherever_its_layers_are(profiled: tuple[Profiler, Profile, int]) -> None:
    profiler, profile, first = profiled
    # Every other placement for each optimizer: where gradients meet does not depend on it.
    for assignment in [*placements(5, 3)][first :: len(OPTIMIZERS)]:
        where = spot(profile, list(assignment))
        traced = profiler.forecast(where.names, where.assignment, where.loose, where.root, 3)
        replayed = replay(profile.timeline, where.assignment, where.root, 3)
        assert replayed == [device.peak for device in traced], assignment


class SumOfOutputs(nn.Module):
    """Layers of which each output is given to the next and added to those before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def self_balance(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x).relu()
            total = total + x
        return total


def test_a_gradient_of_many_tensors_outlives_each_of_them() -> None:
    # The expanded gradient of the sum takes the 512 bytes that a tensor takes as well, and all layers are given it.
    model = SumOfOutputs()
    trial = PlainTrial(None, lambda model, batch: model(batch).sum(), "32-true")
    profiler = Profiler(model, find_blocks(model), trial, [Batch("train batch", "train", torch.randn(4, 32))])
    profile = profiler.profile()
    for assignment in placements(4, 2):
        where = spot(profile, list(assignment))
        traced = profiler.forecast(where.names, where.assignment, where.loose, where.root, 2)
        replayed = replay(profile.timeline, where.assignment, where.root, 2)
        assert replayed == [device.peak for device in traced], assignment


def test_a_bound_is_never_above_what_a_placement_takes(profiled: tuple[Profiler, Profile, int]) -> None:
    profile = profiled[1]
    bound, both = least(profile.timeline)
    assert both
    for assignment in placements(5, 3):
        homes = bound.homes(assignment, root=assignment[-1])
        for storage, (one, other) in both.items():
            homes[storage] = assignment[one] if assignment[one] == assignment[other] else -1
        below, peaks = bound.peaks(homes, 3), replay(profile.timeline, assignment, assignment[-1], 3)
        assert all(low <= peak for low, peak in zip(below, peaks, strict=True)), assignment


@pytest.mark.parametrize(
    ("fan", "text"),
    [
        (Fan(()), "no arrivals"),
        (Fan((Arrival(12),)), "a fan speaks of storage 12, but there are 12 storages"),
        (Fan((Arrival(5, terms=(4,)),)), "1 terms and 0 sums"),
        (Fan((Arrival(5, since=25),)), "a fan speaks of event 25, but there are 24 events"),
        (Fan((Arrival(5, until=26),)), "a fan speaks of event 26, but there are 24 events"),
    ],
)
def test_a_fan_that_speaks_of_what_is_not_there_is_refused(fan: Fan, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Timeline((10,) * 12, OWNERS, VALUES, EVENTS, fans=(fan,))
