from __future__ import annotations

from autobalance.partitioning.bounds import area_bound, indivisible_bound
from autobalance.partitioning.chain import build_chain
from autobalance.partitioning.problem import Problem
from autobalance.profiling.profile import Profile


def test_area_is_the_peak_of_the_whole_over_all_budgets() -> None:
    assert area_bound(Profile.from_costs([4] * 8), (40, 24)) == 32 / 64


def test_the_largest_block_fits_best_on_the_largest_device() -> None:
    profile = Profile.from_costs([4, 20, 4])
    chain = build_chain(profile, {}, None, free_pins=False)
    assert indivisible_bound(Problem(profile.timeline, chain, (40, 80), (0, 0))) == 20 / 80


def test_a_pin_leaves_a_block_no_other_device() -> None:
    profile = Profile.from_costs([4, 20, 4])
    chain = build_chain(profile, {1: 0}, None, free_pins=False)
    assert indivisible_bound(Problem(profile.timeline, chain, (40, 80), (0, 0))) == 20 / 40


def test_a_group_counts_as_one() -> None:
    profile = Profile.from_costs([16, 20, 14], together=[(0, 2)])
    chain = build_chain(profile, {}, None, free_pins=False)
    assert indivisible_bound(Problem(profile.timeline, chain, (40, 80), (0, 0))) == 30 / 80
