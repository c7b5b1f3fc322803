from __future__ import annotations

import random

import pytest

from autobalance.partitioning.stage_peaks import EVERYWHERE, NOWHERE, stage_peaks
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
    peaks = stage_peaks(timeline, [places[owner] for owner in timeline.owners], units)
    for start in range(units + 1):
        for stop in range(start, units + 1):
            here = {unit: start <= unit < stop for unit in range(units)}
            root = places[ROOT] == EVERYWHERE or here.get(places[ROOT], False)
            device_of = [0 if here[unit] else 1 for unit in range(units)] + [0, 1]
            expected = naive_replay(timeline, device_of, 0 if root else 1, 2)[0]
            assert peaks[start, stop] == expected, (start, stop)


def test_a_copy_melts_only_in_stages_that_hold_both_ends() -> None:
    timeline = Timeline(sizes=(10, 10), owners=(0, 1), values=(0, 0), events=(1, 2))
    peaks = stage_peaks(timeline, [0, 1], 2)
    assert peaks[0, 1] == peaks[1, 2] == peaks[0, 2] == 10
