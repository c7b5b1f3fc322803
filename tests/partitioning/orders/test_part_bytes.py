from __future__ import annotations

import random
from itertools import product

import pytest

from autobalance.partitioning.orders.part_bytes import held_by_parts
from autobalance.profiling.timeline import ROOT, Timeline


@pytest.mark.parametrize("seed", range(25))
def test_no_device_peaks_below_what_its_parts_hold_by_themselves(seed: int, random_timeline, naive_replay) -> None:
    rng = random.Random(seed)
    timeline = random_timeline(rng, 4, views=seed % 2 == 1)
    parts = [(0,), (1, 3), (2, ROOT)]
    held = held_by_parts(timeline, parts)
    for devices in product(range(2), repeat=3):
        peaks = naive_replay(timeline, [devices[0], devices[1], devices[2], devices[1]], devices[2], 2)
        for device in range(2):
            assert peaks[device] >= held[:, [part for part in range(3) if devices[part] == device]].sum(axis=1).max()


def test_a_shared_tensor_is_held_once_and_the_highest_instant_is_among_those_looked_at() -> None:
    timeline = Timeline((4, 4, 3, 2), (0, 1, 1, 0), (5, 5, -1, -1), (1, 2, 3, -3, 4))
    assert held_by_parts(timeline, [(0,), (1,)]).tolist()[0] == [4, 3]
