from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from autobalance.partitioning.chains.shared_values import EVERYWHERE, NOWHERE
from autobalance.partitioning.chains.stage_peaks import Reach, band, stage_windows
from autobalance.profiling.timeline import HOST, ROOT, Timeline


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_every_stage_peaks_as_a_replay_of_just_that_stage(
    seed: int, views: bool, random_timeline, naive_replay
) -> None:
    rng = random.Random(seed)
    units = rng.randint(1, 6)
    # Two more owners than units: one that is on the stage's device wherever that is, and one that never is.
    timeline = random_timeline(rng, units + 2, views=views)
    places = {**{unit: unit for unit in range(units)}, units: EVERYWHERE, units + 1: NOWHERE, HOST: NOWHERE}
    places[ROOT] = rng.choice([EVERYWHERE, NOWHERE, units - 1])
    ((peaks, _),) = stage_windows(timeline, [places[owner] for owner in timeline.owners], units)
    for start in range(units + 1):
        for stop in range(start, units + 1):
            here = {unit: start <= unit < stop for unit in range(units)}
            root = places[ROOT] == EVERYWHERE or here.get(places[ROOT], False)
            device_of = [0 if here[unit] else 1 for unit in range(units)] + [0, 1]
            expected = naive_replay(timeline, device_of, 0 if root else 1, 2)[0]
            assert peaks[start, stop] == expected, (start, stop)


def test_a_copy_melts_only_in_stages_that_hold_both_ends() -> None:
    timeline = Timeline(sizes=(10, 10), owners=(0, 1), values=(0, 0), events=(1, 2))
    ((peaks, _),) = stage_windows(timeline, [0, 1], 2)
    assert peaks[0, 1] == peaks[1, 2] == peaks[0, 2] == 10


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_windows_of_time_peak_as_that_part_of_a_replay(seed: int, views: bool, random_timeline) -> None:
    draw = random.Random(seed)
    timeline = random_timeline(draw, 4, views=views)
    places = [owner if owner >= 0 else NOWHERE for owner in timeline.owners]
    count = len(timeline.events)
    cuts = sorted(draw.sample(range(1, count), 3))
    reach = Reach.of([2, 3, 4, 4]) if seed % 2 else None
    windows = list(stage_windows(timeline, places, 4, cuts=cuts, reach=reach))
    for start in range(4):
        for stop in range(start + 1, (reach.last[start] if reach else 4) + 1):
            device_of = [0 if start <= unit < stop else 1 for unit in range(4)]
            held_after = [_held(timeline, device_of, events) for events in range(count + 1)]
            for (first, last), (peaks, held) in zip(pairwise([0, *cuts, count]), windows, strict=True):
                assert peaks[start, stop] == max(held_after[first : last + 1])
                assert held[start, stop] == held_after[last]


def _held(timeline: Timeline, device_of: list[int], events: int) -> int:
    """What device 0 holds after so many events; of a tensor with several storages there, the first one's bytes."""

    def tensor_of(storage: int) -> object:
        whole = timeline.wholes[storage] if timeline.wholes else -1
        if whole >= 0 and is_here(whole):
            return tensor_of(whole)
        return ("shared", timeline.values[storage]) if timeline.values[storage] >= 0 else ("own", storage)

    def is_here(storage: int) -> bool:
        return timeline.owners[storage] >= 0 and device_of[timeline.owners[storage]] == 0

    holders: dict[object, list[int]] = {}
    sizes: dict[object, int] = {}
    for event in timeline.events[:events]:
        storage = abs(event) - 1
        if is_here(storage):
            there = holders.setdefault(tensor_of(storage), [])
            if event < 0:
                there.remove(storage)
            else:
                if not there:
                    sizes[tensor_of(storage)] = timeline.sizes[storage]
                there.append(storage)
    return sum(sizes[tensor] for tensor, there in holders.items() if there)


def test_a_band_turns_ends_of_stages_into_lengths() -> None:
    matrix = np.arange(16).reshape(4, 4)
    assert band(matrix, width=2, fill=-1).tolist() == [[1, 2], [6, 7], [11, -1]]
