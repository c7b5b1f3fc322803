from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from autobalance.partitioning.chains.chain import Chain, build_chain
from autobalance.partitioning.chains.policies import Cut, auto, balanced, sequential
from autobalance.partitioning.chains.reach import Growth, first_limits, growth_of, limits_of, widened
from autobalance.partitioning.chains.stage_peaks import Reach
from autobalance.partitioning.chains.tables import InFlight
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile


def _growth(draw: random.Random, units: int) -> Growth:
    held = np.array([[draw.randint(0, 9) for _ in range(units)] for _ in range(2)])
    held[1] += held[0]  # before the backward what was saved has been added
    return Growth(held, np.array([float(draw.randint(1, 9)) for _ in range(units)]))


@pytest.mark.parametrize("seed", range(20))
def test_no_stage_within_the_limits_is_out_of_reach(seed: int) -> None:
    draw = random.Random(seed)
    growth = _growth(draw, 7)
    most_bytes, most_seconds = draw.randint(5, 40), draw.randint(5, 30)
    reach = growth.reach(most_bytes, most_seconds)
    for start in range(7):
        fitting = [
            stop
            for stop in range(start + 1, 8)
            if growth.held[:, start:stop].sum(axis=1).max() <= most_bytes
            and growth.seconds[start:stop].sum() <= most_seconds
        ]
        # A unit by itself is always of interest: every unit lies somewhere.
        assert reach.last[start] == max([*fitting, start + 1, *reach.last[:start]])


def test_a_reach_knows_its_longest_stages_from_both_ends() -> None:
    reach = Reach.of([2, 5, 3, 4, 5])
    assert reach.last == (2, 5, 5, 5, 5), "a stage that begins later never has to end earlier"
    assert reach.first == (0, 0, 1, 1, 1)
    assert reach.width == 4
    assert Reach.of([2, 4, 5, 5, 5]).is_within(reach)
    assert not reach.is_within(Reach.of([2, 4, 5, 5, 5]))


def test_units_grow_by_what_they_hold_before_the_forward_and_before_the_backward() -> None:
    profile = Profile.from_costs([1, 2, 4], saved=[10, 20, 40], transient=[5, 5, 5])
    chain = build_chain(profile, {}, None, free_pins=False)
    growth = growth_of(profile.timeline, chain, [np.array([1.0, 5.0, 2.0]), np.array([2.0, 3.0, 2.0])])
    assert growth.held.tolist() == [[1, 2, 4], [11, 22, 44]]
    assert growth.seconds.tolist() == [1.0, 3.0, 2.0], "of each unit on the device that is fastest with it"
    only_at_rest = growth_of(profile.timeline, chain, [np.ones(3)], before=("forward",))
    assert only_at_rest.held.tolist() == [[1, 2, 4]]


def test_what_units_share_or_have_beside_them_is_no_growth_of_theirs() -> None:
    profile = Profile.from_costs([1, 2, 4])
    beside = Chain(((0,), (2,)), (), {})
    assert growth_of(profile.timeline, beside, [np.ones(2)]).held[0].tolist() == [1, 4]


@pytest.mark.parametrize("in_flight", [lambda left: 1, lambda left: min(3, left), lambda left: 3])
@pytest.mark.parametrize("seed", range(10))
def test_an_even_use_is_about_the_best_of_all_cuts(seed: int, in_flight: InFlight) -> None:
    draw = random.Random(seed)
    growth, budget, devices = _growth(draw, 8), 200, 3
    static, kept = growth.held[0], growth.held[1] - growth.held[0]
    least = min(
        max(
            (static[start:stop].sum() + in_flight(devices - at) * kept[start:stop].sum()) / budget
            for at, (start, stop) in enumerate(zip((0, *cuts), (*cuts, 8), strict=True))
        )
        for cuts in combinations(range(9), devices - 1)
    )
    # Halved ten times from the whole on: to a thousandth.
    assert least <= growth.even_use([budget] * devices, in_flight) <= least + 1 / 1024


def test_first_limits_are_guesses_a_little_above_the_least() -> None:
    growth = Growth(np.array([[10, 10, 10, 10]]), np.array([1.0, 1.0, 1.0, 3.0]))

    def one(left: int) -> int:
        return 1

    held, seconds = first_limits(balanced, growth, (40, 40), 1, one, memory=True)
    assert 20 <= held <= 1.06 * 20
    assert seconds == np.inf
    assert first_limits(auto, growth, (40, 40), 4, one, memory=True) == (40.0, pytest.approx(1.05 * 3.0))
    assert first_limits(auto, growth, (40, 40), 1, one, memory=False) == (np.inf, np.inf)
    assert first_limits(sequential, growth, (40, 20), 1, one, memory=True) == (40.0, np.inf)


def test_what_was_found_limits_the_stages_of_any_better_plan() -> None:
    growth = Growth(np.array([[10, 10]]), np.array([2.0, 4.0]))
    assert limits_of(balanced, growth, None, 40.0, 1, 0.0) == (40.0, np.inf)
    assert limits_of(balanced, growth, Cut((0.75,), ()), 40.0, 1, 0.0) == (30.0, np.inf)
    # Of three micro-batches, a step within 2 % of 20 s leaves the two others 20.4 - 6 s.
    assert limits_of(auto, growth, Cut((20.0, 0.5), ()), 40.0, 3, 0.0) == (40.0, pytest.approx((20.4 - 6) / 2))
    assert limits_of(auto, growth, Cut((20.0, 0.5), ()), 40.0, 3, 30.0) == (40.0, pytest.approx((30.6 - 6) / 2))
    assert limits_of(sequential, growth, Cut((2.0,), ()), 40.0, 3, 0.0) == (40.0, np.inf)


def test_limits_widen_to_what_is_needed_or_step_by_step_while_nothing_is_found() -> None:
    assert widened((10.0, 2.0), (12.0, 1.0), is_found=True) == (12.0, 2.0)
    assert widened((10.0, 2.0), (12.0, np.inf), is_found=False) == (12.0, 3.0)


def test_what_blocks_take_only_while_they_run_keeps_no_stage_of_a_long_chain_out_of_reach() -> None:
    profile = Profile.from_costs([1] * 150, saved=[1] * 150, transient=[50] * 150)
    # Half of the blocks hold 75 + 75 bytes, and the one that runs 50 more.
    assert plan(profile, [200, 200], policy="balanced").peaks == (200, 200)
