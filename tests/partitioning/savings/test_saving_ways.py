"""Ways side by side, against all events of a stage, and what may be forgotten of them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autobalance.partitioning.savings.saving_options import options_of
from autobalance.partitioning.savings.saving_ways import OneWay, Ways
from tests.partitioning.stage_by_events import peak_of_events, random_costs


@pytest.mark.parametrize("seed", range(20))
def test_a_way_takes_what_its_events_do_whether_built_block_by_block_or_changed(seed: int) -> None:
    draw = random.Random(seed)
    blocks, in_flight = draw.randint(1, 6), draw.randint(1, 4)
    costs = random_costs(draw, blocks, offload=True, stream=seed % 2 == 1)
    options = [options_of(costs, block, in_flight, 10.0) for block in range(blocks)]
    chosen = [draw.choice(each) for each in options]
    expected = peak_of_events(
        costs,
        [option.saving for option in chosen],
        [block for block, option in enumerate(chosen) if option.streams],
        in_flight,
    )
    ways = Ways.start()
    for option in reversed(chosen):
        ways = ways.before(option, in_flight)
    assert ways.taken().tolist() == [expected - costs.static.sum()]
    one = OneWay([each[0] for each in options], in_flight)
    for block in draw.sample(range(blocks), blocks):
        one.put(block, chosen[block])
    assert one.taken() == expected - costs.static.sum()
    assert one.pinned() == ways.pinned[0] == sum(option.pinned for option in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_forgotten_is_never_needed(seed: int) -> None:
    draw = random.Random(seed)
    in_flight = draw.randint(1, 3)
    costs = random_costs(draw, 5, offload=True, stream=seed % 2 == 1)
    options = [options_of(costs, block, in_flight, 10.0) for block in range(5)]
    ways = Ways.start()
    for block in (4, 3, 2):
        ways = Ways.joined([ways.before(option, in_flight) for option in options[block]])
    kept = ways.at(ways.front())
    forgotten = ways.at(np.setdiff1d(np.arange(len(ways)), ways.front()))
    for first, second in product(options[0], options[1]):
        before, after = (some.before(second, in_flight).before(first, in_flight) for some in (forgotten, kept))
        for way in range(len(before)):
            as_good = (after.taken() <= before.taken()[way]) & (after.pinned <= before.pinned[way])
            as_good &= (after.copying <= before.copying[way]) & (after.seconds <= before.seconds[way] + 1e-9)
            assert as_good.any()


def test_ways_that_others_surpass_are_forgotten() -> None:
    """Two blocks of equal bytes, of which one runs again in less time than the other."""
    nothing = np.zeros(2, dtype=np.int64)
    costs = random_costs(random.Random(0), 2)
    costs = replace(
        costs,
        saved=nothing + 20,
        kept=nothing,
        forward_transient=nothing,
        backward_transient=nothing,
        forward_time=np.array([1.0, 3.0]),
        recomputable=np.array([True, True]),
    )
    ways = Ways.start()
    for block in (1, 0):
        ways = Ways.joined([ways.before(option, 3) for option in options_of(costs, block, 3, 10.0)])
    # All keep, the first runs again, or both. That the second alone does takes longer, and no less.
    assert sorted(ways.seconds[ways.front()].tolist()) == [0.0, 1.0, 4.0]


def test_of_equal_ways_one_is_kept() -> None:
    ways = Ways.joined([Ways.start(), Ways.start(), Ways.start()])
    assert len(ways.front()) == 1
    cheap, dear = Ways.start(), Ways(*(np.full(1, float(at == 2)) for at in range(7)))
    assert ways.joined([dear, cheap]).front().tolist() == [1]
