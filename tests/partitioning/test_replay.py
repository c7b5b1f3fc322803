from __future__ import annotations

import random

import pytest

from autobalance.partitioning.replay import replay


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
