from __future__ import annotations

import random
from itertools import product

import pytest

from autobalance.partitioning.savings.saving_options import options_of
from autobalance.partitioning.savings.saving_ways import OneWay
from autobalance.partitioning.savings.staging import least_staging
from tests.partitioning.stage_by_events import random_costs


@pytest.mark.parametrize("seed", range(60))
def test_no_way_that_fits_stages_less(seed: int) -> None:
    rng = random.Random(seed)
    costs, in_flight = random_costs(rng, 4, stream=True, offload=bool(seed % 2)), rng.choice((1, 2))
    options = [options_of(costs, block, in_flight, 50.0) for block in range(4)]
    taken = OneWay([each[0] for each in options], in_flight).taken()
    room = taken * rng.uniform(0.3, 1.0)
    said = least_staging(options, in_flight, room)
    for way in product(*options):
        if OneWay(way, in_flight).taken() <= room:
            staged = [option.staged for option in way if option.streams]
            pairs = [one + other for one, other in zip(staged, [*staged[1:], 0.0], strict=False)]
            assert max(pairs, default=0.0) >= said


def test_large_blocks_that_must_stream_are_neighbours_where_too_few_smaller_ones_part_them() -> None:
    costs = random_costs(random.Random(1), 4, stream=True)
    costs.saved[:] = costs.kept[:] = costs.left[:] = costs.forward_transient[:] = costs.backward_transient[:] = 0
    for column in (costs.static, costs.streamable, costs.staged):
        column[:] = (10, 10, 1, 10)
    options = [options_of(costs, block, 1, 50.0) for block in range(4)]
    # Of 7 bytes too many, one block would do; of 11 it takes two, of which one may be the small one.
    assert least_staging(options, 1, -7.0) == 0.0
    assert least_staging(options, 1, -11.0) == 2.0
    # For 20 and what is staged it takes three large ones, and the small one parts but two of them.
    assert least_staging(options, 1, -20.0) == 20.0
    assert least_staging(options, 1, 0.0) == 0.0
