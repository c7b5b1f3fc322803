"""Bounds of all stages at once, against the fastest way of each."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autobalance.partitioning.savings.knapsack import least_seconds
from autobalance.partitioning.savings.knapsack_bounds import WindowBounds
from autobalance.partitioning.savings.savings import SavingCosts
from tests.partitioning.stage_by_events import peak_of_events, random_costs


def seconds_of_windows(costs: SavingCosts, longest: int) -> np.ndarray:
    count = len(costs)
    seconds = np.full((count, longest), np.inf)
    for start in range(count):
        for stop in range(start + 1, min(start + longest, count) + 1):
            seconds[start, stop - start - 1] = 2 * costs.forward_time[start:stop].sum()
    return seconds


@pytest.mark.parametrize("seed", range(45))
def test_no_stage_is_faster_than_its_bound(seed: int) -> None:
    draw = random.Random(seed)
    costs = random_costs(draw, 9, offload=seed % 3 == 1, stream=seed % 3 == 2)
    longest, host_link = 6, draw.uniform(5, 40)
    seconds = seconds_of_windows(costs, longest)
    bounds = WindowBounds(costs, longest, host_link)
    for in_flight in (1, 3):
        most = peak_of_events(costs, ["keep"] * 9, (), in_flight)
        capacity = int(most * draw.uniform(0.2, 0.6))
        least = bounds.least(in_flight=in_flight, capacity=capacity, seconds=seconds)
        assert np.array_equal(
            least,
            WindowBounds(costs, longest, host_link).least(in_flight=in_flight, capacity=capacity, seconds=seconds),
        )
        for start, length in np.ndindex(*least.shape):
            if start + length >= 9:
                assert least[start, length] == np.inf
                continue
            found = least_seconds(
                costs,
                start,
                start + length + 1,
                in_flight=in_flight,
                capacity=capacity,
                seconds=seconds[start, length],
                host_link=host_link,
            )
            exact = np.inf if found is None else found.seconds
            assert least[start, length] <= exact * (1 + 1e-9), (start, length)
            if found is not None and set(found.saving) == {"keep"} and not found.streamed:
                assert least[start, length] == exact


def test_a_bound_takes_the_cheapest_bytes_first_and_the_last_of_them_in_part() -> None:
    nothing = np.zeros(3, dtype=np.int64)
    costs = SavingCosts(
        static=np.array([1, 1, 1]),
        saved=np.array([10, 10, 10]),
        kept=nothing,
        left=nothing,
        forward_transient=nothing,
        backward_transient=nothing,
        forward_time=np.array([3.0, 1.0, 2.0]),
        recomputable=np.array([True, True, True]),
        offloadable=np.array([False] * 3),
        streamable=nothing,
        carried=nothing,
        staged=nothing,
        pinned_saved=nothing,
        pinned_weights=nothing,
    )
    # Of 2 * 30 bytes 15 each must go from two micro-batches: all of the second block's, half of the third's.
    least = WindowBounds(costs, 3, np.inf).least(in_flight=2, capacity=3 + 30, seconds=np.full((3, 3), 20.0))
    assert least[0, 2] == pytest.approx(20 + 1 + 2 / 2)
    assert least[2, 0] == 20
