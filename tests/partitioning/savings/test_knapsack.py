"""The fastest way for a stage to fit, against trying all ways on the events of its micro-batches."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from autobalance.partitioning.savings.knapsack import least_seconds
from autobalance.partitioning.savings.savings import SavingCosts
from tests.partitioning.stage_by_events import peak_of_events, random_costs

WORDS = ("keep", "recompute", "offload")


def all_ways(
    costs: SavingCosts, in_flight: int, capacity: int, seconds: float, host_link: float, host_memory: float
) -> float:
    """Least time over all ways, infinite where none fits."""
    least = np.inf
    blocks = range(len(costs))
    for saving in product(WORDS, repeat=len(costs)):
        if any(
            (word == "recompute" and not costs.recomputable[block])
            or (word == "offload" and not costs.offloadable[block])
            for block, word in enumerate(saving)
        ):
            continue
        again = sum(costs.forward_time[block] for block in blocks if saving[block] == "recompute")
        out = [block for block in blocks if saving[block] == "offload"]
        for chosen in product(*([False, True] if costs.streamable[block] else [False] for block in blocks)):
            streamed = [block for block in blocks if chosen[block]]
            carried = sum(2 * (costs.saved[block] - costs.left[block]) for block in out) + sum(
                costs.carried[block] for block in streamed
            )
            pinned = sum(in_flight * costs.pinned_saved[block] for block in out)
            pinned += sum(costs.pinned_weights[block] for block in streamed)
            time = max(seconds + again, carried / host_link)
            if (
                time < least
                and pinned <= host_memory
                and peak_of_events(costs, saving, streamed, in_flight) <= capacity
            ):
                least = time
    return float(least)


@pytest.mark.parametrize("seed", range(150))
def test_no_way_is_faster_than_the_one_that_is_found(seed: int) -> None:
    draw = random.Random(seed)
    offload, stream = seed % 3 == 1, seed % 3 == 2
    blocks = draw.randint(1, 7 if not (offload or stream) else 5)
    costs = random_costs(draw, blocks, offload=offload or (stream and draw.random() < 0.3), stream=stream)
    in_flight, seconds = draw.randint(1, 4), draw.choice([0.0, 4.0])
    most = peak_of_events(costs, ["keep"] * blocks, (), in_flight)
    capacity = int(most * draw.uniform(0.4, 1.02))
    host_link, host_memory = draw.uniform(5, 40), draw.choice([None, 60, 200])
    found = least_seconds(
        costs,
        0,
        blocks,
        in_flight=in_flight,
        capacity=capacity,
        seconds=seconds,
        host_link=host_link,
        host_memory=host_memory,
    )
    least = all_ways(costs, in_flight, capacity, seconds, host_link, np.inf if host_memory is None else host_memory)
    if found is None:
        assert least == np.inf
        return
    assert found.seconds == pytest.approx(least)
    assert found.peak == peak_of_events(costs, found.saving, found.streamed, in_flight) <= capacity
    assert found.pinned <= (np.inf if host_memory is None else host_memory)
