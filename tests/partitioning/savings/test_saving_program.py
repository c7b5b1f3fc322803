"""The mixed-integer program of a stage, against the search from block to block, which brute force judges."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autobalance.partitioning.savings import knapsack
from autobalance.partitioning.savings.saving_options import options_of
from autobalance.partitioning.savings.saving_program import solve_program
from tests.partitioning.stage_by_events import peak_of_events, random_costs


@pytest.mark.parametrize("seed", range(30))
def test_the_program_finds_as_fast_a_way(seed: int) -> None:
    pytest.importorskip("scipy")
    draw = random.Random(seed)
    blocks, in_flight = draw.randint(2, 7), draw.randint(1, 4)
    costs = random_costs(draw, blocks, offload=True, stream=seed % 2 == 1)
    capacity = int(peak_of_events(costs, ["keep"] * blocks, (), in_flight) * draw.uniform(0.5, 0.9))
    host_link, host_memory = draw.uniform(5, 40), draw.choice([None, 150])
    known = knapsack.least_seconds(
        costs,
        0,
        blocks,
        in_flight=in_flight,
        capacity=capacity,
        seconds=4.0,
        host_link=host_link,
        host_memory=host_memory,
    )
    options = [options_of(costs, block, in_flight, host_link) for block in range(blocks)]
    room = float(capacity - costs.static.sum())
    found, bound = solve_program(
        options, in_flight, room, 4.0, np.inf if host_memory is None else float(host_memory), tight=seed % 3 == 0
    )
    if known is None:
        assert found is None
        return
    assert found is not None
    time = max(4.0 + sum(option.seconds for option in found), sum(option.copying for option in found))
    assert time == pytest.approx(known.seconds)
    assert bound == pytest.approx(known.seconds, rel=2e-6)


def test_long_stages_that_offload_are_proved_by_it() -> None:
    pytest.importorskip("scipy")
    draw = random.Random(3)
    costs = random_costs(draw, 40, offload=True)
    capacity = int(peak_of_events(costs, ["keep"] * 40, (), 2) * 0.6)
    found = knapsack.least_seconds(costs, 0, 40, in_flight=2, capacity=capacity, seconds=4.0, host_link=30.0)
    assert found is not None
    assert found.proved
    assert found.peak == peak_of_events(costs, found.saving, (), 2) <= capacity


def test_without_scipy_the_bound_says_how_far_off_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "has_solver", lambda: False)
    draw = random.Random(3)
    costs = random_costs(draw, 40, offload=True)
    capacity = int(peak_of_events(costs, ["keep"] * 40, (), 2) * 0.6)
    found = knapsack.least_seconds(costs, 0, 40, in_flight=2, capacity=capacity, seconds=4.0, host_link=30.0)
    assert found is not None
    assert found.bound <= found.seconds
    assert found.peak <= capacity
