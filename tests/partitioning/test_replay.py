from __future__ import annotations

import random

import pytest

from autobalance.partitioning.replay import replay, replay_allocator
from autobalance.profiling.timeline import ROOT, Timeline


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_any_assignment_replays_as_looking_at_every_instant_does(
    seed: int, views: bool, random_timeline, naive_replay
) -> None:
    rng = random.Random(seed)
    blocks, devices = rng.randint(1, 6), rng.randint(1, 4)
    timeline = random_timeline(rng, blocks, views=views)
    assignment = [rng.randrange(devices) for _ in range(blocks)]
    root = rng.randrange(devices)
    assert replay(timeline, assignment, root, devices) == naive_replay(timeline, assignment, root, devices)


def test_each_device_has_an_allocator_of_its_own() -> None:
    mib = 2**20
    timeline = Timeline(
        sizes=(12 * mib, 12 * mib, 30 * mib, 12 * mib),
        owners=(0, 1, 1, ROOT),
        values=(0, 0, -1, -1),  # block 1 is given what block 0 made
        events=(1, 2, -1, 3, 4),
    )
    alone, other = replay_allocator(timeline, [0, 1], root=0, devices=2)
    assert (alone.allocated, alone.reserved) == (12 * mib, 12 * mib)  # what died serves the root
    assert (other.allocated, other.reserved) == (42 * mib, 42 * mib)
    together = replay_allocator(timeline, [0, 0], root=0, devices=1)[0]
    assert together.allocated == 54 * mib


@pytest.mark.parametrize("seed", range(20))
def test_bytes_in_use_are_at_least_those_of_the_tensors(seed: int, random_timeline) -> None:
    rng = random.Random(seed)
    timeline = random_timeline(rng, 4, views=True)
    assignment = [rng.randrange(3) for _ in range(4)]
    peaks = replay(timeline, assignment, 0, 3)
    for peak, device in zip(peaks, replay_allocator(timeline, assignment, 0, 3), strict=True):
        assert 512 * bool(peak) <= device.allocated <= 512 * peak  # every storage takes 512 bytes or more
