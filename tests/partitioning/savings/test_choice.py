from __future__ import annotations

from dataclasses import replace

import numpy as np

from autobalance.partitioning.savings.choice import choice_of
from autobalance.partitioning.savings.savings import saving_costs
from autobalance.profiling.profile import Profile
from autobalance.units import pinned_bytes

PROFILE = Profile.from_costs([10] * 4, saved=[20, 30, 40, 50])
COSTS = saving_costs(PROFILE.blocks, [1.0, 2.0, 4.0, 8.0], offload=True)


def test_a_choice_takes_the_forwards_again_or_waits_for_the_host() -> None:
    # Blocks 1 to 3 of four: 30 bytes are made again in 2 s, 40 go to the host and come back.
    words = ("recompute", "offload", "keep")
    found = choice_of(COSTS, 1, words, (), in_flight=3, seconds=20.0, host_link=10.0)
    assert found.seconds == found.bound == 22.0
    assert found.carried == 80
    assert found.pinned == 3 * pinned_bytes([40])
    # 30 stay, 50 rest of each of two others; while the last one runs nothing else rests of the third.
    assert found.peak == 30 + 2 * 50 + 50
    assert choice_of(COSTS, 1, words, (), in_flight=3, seconds=20.0, host_link=2.0).seconds == 80 / 2.0


def test_a_choice_is_proved_where_its_bound_is_no_more_than_a_rounding_below() -> None:
    found = choice_of(COSTS, 0, ("keep",) * 4, (), in_flight=1, seconds=1.0, host_link=1.0)
    assert found.proved
    assert replace(found, bound=found.seconds * (1 - 1e-7)).proved
    assert not replace(found, bound=found.seconds * (1 - 1e-5)).proved
    assert np.isclose(found.peak, 40 + 140)
