from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from autobalance.devices.words import parse_devices
from autobalance.partitioning.bounds import (
    advice_on_time,
    advice_on_use,
    area_bound,
    indivisible_bound,
    loop_bounds,
    time_bounds,
)
from autobalance.partitioning.chains.chain import build_chain
from autobalance.partitioning.chains.problem import Problem
from autobalance.profiling.profile import Profile
from autobalance.schedules.clock import run_clock
from autobalance.schedules.launches import launch_order


def _problem(profile: Profile, budgets: tuple[int, ...], pins: dict[int, int] | None = None, **how: object) -> Problem:
    chain = build_chain(profile, pins or {}, None, free_pins=False)
    return Problem(profile, chain, parse_devices(list(budgets)), budgets, **how)  # type: ignore[arg-type]


def test_area_is_the_peak_of_the_whole_over_all_budgets() -> None:
    assert area_bound(_problem(Profile.from_costs([4] * 8), (40, 24))) == 32 / 64


def test_the_largest_block_fits_best_on_the_largest_device() -> None:
    assert indivisible_bound(_problem(Profile.from_costs([4, 20, 4]), (40, 80))) == 20 / 80


def test_a_pin_leaves_a_block_no_other_device() -> None:
    assert indivisible_bound(_problem(Profile.from_costs([4, 20, 4]), (40, 80), pins={1: 0})) == 20 / 40


def test_a_group_counts_as_one() -> None:
    profile = Profile.from_costs([16, 20, 14], together=[(0, 2)])
    assert indivisible_bound(_problem(profile, (40, 80))) == 30 / 80


def test_step_time_is_bounded_by_all_work_then_by_the_longest_block() -> None:
    # 8 s in all, 6 s in the longest stage of any split into whole blocks; 4 micro-batches on 2 devices.
    profile = Profile.from_costs([1] * 4, forward_time=[1, 1, 3, 1], backward_time=[0, 0, 2, 0], batch_size=4)
    problem = _problem(profile, (9, 9), schedule="1f1b", micro_batches=4)
    assert time_bounds(problem) == {"area": 8 + 3 * 4.0, "indivisible block": 8 + 3 * 6.0, "transfers": 8 + 3 * 6.0}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_visits_is_faster_than_the_bounds_of_loops(seed: int, training: bool) -> None:
    rng = random.Random(seed)
    forward = [float(rng.choice((1, 2, 9))) for _ in range(5)]
    backward = [2 * seconds if training else 0.0 for seconds in forward]
    profile = Profile.from_costs([1] * 5, forward_time=forward, backward_time=backward)
    problem = _problem(replace(profile, training=training), (9, 9), schedule="looped", micro_batches=3)
    bounds, least = loop_bounds(problem), float("inf")
    for places in product(range(2), repeat=5):
        for schedule in ("looped", "gpipe", "naive"):
            order = launch_order(schedule, 5, 3, devices=places, training=training)
            slots = run_clock(order, places, forward, backward, [0.0] * 5)
            least = min(least, max(slot.stop for slot in slots))
    assert sum(forward + backward) <= bounds["area"] <= bounds["indivisible block"] <= least


def test_the_block_that_decides_is_named_with_what_splitting_it_would_gain() -> None:
    profile = Profile.from_costs([1] * 3, forward_time=[1, 6, 1], batch_size=3, names=["a", "wide", "c"])
    problem = _problem(profile, (9, 9, 9), schedule="1f1b", micro_batches=3)
    # 8 + 2 * 6 = 20 s as it is; in halves 8 + 2 * 3 = 14 s.
    (advice,) = advice_on_time(problem, time_bounds(problem))
    assert advice == ("splitting 'wide', which takes 75% of a micro-batch by itself (6 s), in two would gain up to 30%")


def test_the_block_that_fills_a_device_is_named() -> None:
    problem = _problem(Profile.from_costs([10, 40, 10], names=["a", "wide", "c"]), (100,) * 3)
    (advice,) = advice_on_use(problem, {"area": 0.2, "indivisible block": 0.4})
    assert advice == "splitting 'wide', which by itself fills 40% of a device, in two would gain up to 50%"


@pytest.mark.parametrize("sizes", [[10] * 6, [11, 9, 10, 10, 10, 10]])
def test_blocks_that_decide_nothing_are_not_named(sizes: list[int]) -> None:
    problem = _problem(Profile.from_costs(sizes), (100, 100))
    assert advice_on_use(problem, {"area": 0.3, "indivisible block": 0.3}) == ()
