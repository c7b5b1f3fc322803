"""Fractional knapsacks of a stage: never above the fastest way, and never without one of its options."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from autobalance.partitioning.savings.relaxation import Relaxation, relaxed, steps_of
from autobalance.partitioning.savings.saving_options import Option, options_of
from autobalance.partitioning.savings.saving_ways import OneWay
from tests.partitioning.stage_by_events import peak_of_events, random_costs

SECONDS = 2.0


def _option(rests: float, seconds: float, copying: float = 0.0, saving: str = "recompute") -> Option:
    return Option(saving, False, rests, 0.0, 0.0, 0.0, seconds, copying, 0.0)


def test_steps_lead_along_the_cheapest_bytes_and_past_what_lies_above_them() -> None:
    # 10 bytes for 1 s, 4 for 1.2 s and 12 for 6 s: the second lies above the line between nothing and the first.
    block = [_option(12, 0.0), _option(2, 1.0), _option(8, 1.2), _option(0, 6.0)]
    other = [_option(5, 0.0), _option(0, 1.0)]
    steps = steps_of([block, other], [1, 1], weight=1.0)
    assert [(step.block, step.gain, step.price) for step in steps] == [(0, 10, 1.0), (1, 5, 1.0), (0, 2, 5.0)]
    assert [step.ratio for step in steps] == [0.1, 0.2, 2.5]
    assert [step.gain for step in steps_of([block, other], [1, 4], weight=1.0)] == [20, 10, 2]


def _ways(options: list[list[Option]], in_flight: int, room: float) -> list[tuple[float, tuple[Option, ...]]]:
    """Seconds of all ways that fit."""
    found = []
    for chosen in product(*options):
        if OneWay(chosen, in_flight).taken() <= room:
            again = SECONDS + sum(option.seconds for option in chosen)
            found.append((max(again, sum(option.copying for option in chosen)), chosen))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_no_way_is_faster_than_the_bound_and_none_that_is_fast_loses_an_option(seed: int) -> None:
    draw = random.Random(seed)
    blocks, in_flight = draw.randint(2, 5), draw.randint(1, 4)
    costs = random_costs(draw, blocks, offload=seed % 3 != 0, stream=seed % 3 == 2)
    most = peak_of_events(costs, ["keep"] * blocks, (), in_flight)
    room = most * draw.uniform(0.5, 0.95) - costs.static.sum()
    options = [options_of(costs, block, in_flight, 20.0) for block in range(blocks)]
    ways = _ways(options, in_flight, room)
    found = relaxed(options, in_flight, room, SECONDS)
    least = min((seconds for seconds, _ in ways), default=np.inf)
    assert found.bound <= least * (1 + 1e-9)
    target = least * 1.1
    worth = found.worth(options, target)
    for seconds, chosen in ways:
        if seconds < target:
            assert all(option in kept for option, kept in zip(chosen, worth, strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_the_best_weight_is_as_good_as_any(seed: int) -> None:
    draw = random.Random(seed)
    costs = random_costs(draw, 6, offload=True)
    options = [options_of(costs, block, 2, 20.0) for block in range(6)]
    room = peak_of_events(costs, ["keep"] * 6, (), 2) * 0.6 - costs.static.sum()
    bounds = [Relaxation(options, 2, room, SECONDS, weight).bound for weight in np.linspace(0, 1, 21)]
    assert relaxed(options, 2, room, SECONDS).bound >= max(bounds) * (1 - 1e-3)
