"""The fastest way for a stage to fit, against trying all ways on the events of its micro-batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from autobalance.partitioning.knapsack import Choice, least_seconds
from autobalance.partitioning.savings import SavingCosts

WORDS = ("keep", "recompute", "offload")


def random_costs(draw: random.Random, blocks: int, *, offload: bool = False, stream: bool = False) -> SavingCosts:
    def column(low: int, high: int) -> np.ndarray:
        return np.array([draw.randint(low, high) for _ in range(blocks)], dtype=np.int64)

    weights, saved = column(0, 20), column(0, 40)
    may_stream = np.array([stream and draw.random() < 0.7 for _ in range(blocks)])
    return SavingCosts(
        static=weights + 5,
        saved=saved,
        kept=column(0, 12),
        forward_transient=column(0, 30),
        backward_transient=column(0, 30),
        forward_time=np.array([draw.choice([0.0, 1.0, draw.uniform(0.5, 3)]) for _ in range(blocks)]),
        recomputable=np.array([draw.random() < 0.8 for _ in range(blocks)]),
        offloadable=np.array([offload and draw.random() < 0.8 for _ in range(blocks)]),
        streamable=np.where(may_stream, weights, 0),
        carried=np.where(may_stream, 2 * weights, 0),
        staged=np.where(may_stream, weights, 0),
        pinned_saved=saved * 2,
        pinned_weights=np.where(may_stream, weights * 2, 0),
    )


def peak_of_events(costs: SavingCosts, saving: Sequence[str], streamed: Sequence[int], in_flight: int) -> int:
    """Every birth and death of one stage: so many forwards, then backward and forward in turn, then backwards."""
    used = peak = int(costs.static.sum())
    held = [costs.staged[block] for block in streamed]
    used -= sum(int(costs.streamable[block]) for block in streamed)
    used += max((int(one + other) for one, other in zip(held, [*held, 0][1:], strict=True)), default=0)

    def change(nbytes: int) -> None:
        nonlocal used, peak
        used += int(nbytes)
        peak = max(peak, used)

    def forward() -> None:
        for block, word in enumerate(saving):
            change(costs.forward_transient[block])
            change(-costs.forward_transient[block])
            change(costs.saved[block])
            change({"keep": 0, "recompute": costs.kept[block] - costs.saved[block], "offload": -costs.saved[block]}[word])

    def backward() -> None:
        for block in reversed(range(len(saving))):
            if saving[block] == "recompute":
                change(costs.forward_transient[block])
                change(-costs.forward_transient[block])
                change(costs.saved[block] - costs.kept[block])
            elif saving[block] == "offload":
                change(costs.saved[block])
            change(costs.backward_transient[block])
            change(-costs.backward_transient[block])
            change(-costs.saved[block])

    for _ in range(in_flight):
        forward()
    for _ in range(2):
        backward()
        forward()
    for _ in range(in_flight):
        backward()
    return peak


def all_ways(
    costs: SavingCosts, in_flight: int, capacity: int, seconds: float, host_link: float, host_memory: float
) -> float:
    """Least time over all ways, infinite where none fits."""
    least = np.inf
    blocks = range(len(costs))
    for saving in product(WORDS, repeat=len(costs)):
        if any(
            (word == "recompute" and not costs.recomputable[block]) or (word == "offload" and not costs.offloadable[block])
            for block, word in enumerate(saving)
        ):
            continue
        again = sum(costs.forward_time[block] for block in blocks if saving[block] == "recompute")
        out = [block for block in blocks if saving[block] == "offload"]
        for chosen in product(*([False, True] if costs.streamable[block] else [False] for block in blocks)):
            streamed = [block for block in blocks if chosen[block]]
            carried = sum(2 * costs.saved[block] for block in out) + sum(costs.carried[block] for block in streamed)
            pinned = sum(in_flight * costs.pinned_saved[block] for block in out)
            pinned += sum(costs.pinned_weights[block] for block in streamed)
            time = max(seconds + again, carried / host_link)
            if time < least and pinned <= host_memory and peak_of_events(costs, saving, streamed, in_flight) <= capacity:
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
