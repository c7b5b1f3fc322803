from __future__ import annotations

import random
from itertools import combinations, permutations

import numpy as np
import pytest

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.step_time import Fastest
from autobalance.partitioning.chains.tables import Table, Tables

_Way = tuple[tuple[int, int, int], ...]


class _RandomTables(Tables):
    """Tables with random uses, some of them infinite."""

    def use(self, kind: int, left: int) -> Table:
        held = self.in_flight(left)
        uses = np.random.default_rng([kind, held, *self.counts]).integers(1, 9, (self.units, self.width)) / 8.0
        uses[np.arange(self.units)[:, None] + np.arange(self.width) >= self.units] = np.inf
        self._uses.setdefault((kind, held), np.where(uses > 7 / 8, np.inf, uses))
        return self._uses[kind, held]


def _tables(draw: random.Random) -> Tables:
    units = draw.randint(1, 6)
    devices = iter(range(9))
    kinds = tuple(Kind(tuple(next(devices) for _ in range(draw.randint(1, 2))), 8) for _ in range(draw.randint(1, 2)))
    numbers = np.random.default_rng(draw.randint(0, 10**6))
    before = draw.choice([1, len(kinds) + 1])
    return _RandomTables(
        kinds,
        Chain(tuple((unit,) for unit in range(units)), (), {}),
        None,
        seconds=[numbers.integers(1, 9, units).astype(float) for _ in kinds],
        # Only a device of its own can have something beside the chain.
        beside=[
            float(draw.randint(1, 20)) if len(kind.devices) == 1 and draw.random() < 0.4 else 0.0 for kind in kinds
        ],
        arriving=[numbers.integers(0, 5, (before, units, units)).astype(float) for _ in kinds],
        in_flight=draw.choice([lambda left: 1, lambda left: min(2, left)]),
        width=units,
    )


def _ways(tables: Tables, most: float = np.inf) -> dict[_Way, tuple[float, float]]:
    """Every way whose uses are allowed: the seconds of one micro-batch, and those of each further one."""
    kind_of = [kind for kind, here in enumerate(tables.kinds) for _ in here.devices]
    found: dict[_Way, tuple[float, float]] = {}
    for stages in range(1, min(tables.units, len(kind_of)) + 1):
        for cuts in combinations(range(1, tables.units), stages - 1):
            edges = (0, *cuts, tables.units)
            for order in permutations(kind_of, stages):
                way = tuple((kind, edges[at], edges[at + 1]) for at, kind in enumerate(order))
                uses = [
                    tables.use(kind, stages - at)[start, stop - start - 1] for at, (kind, start, stop) in enumerate(way)
                ]
                if max(uses) <= min(most, 1.0):
                    found[way] = _seconds(tables, way)
    return found


def _seconds(tables: Tables, way: _Way) -> tuple[float, float]:
    # What lies beside the chain takes its time with a stage or without.
    times, before = dict(enumerate(tables.beside)), -1
    for kind, start, stop in way:
        arriving = tables.arriving[kind][before if len(tables.arriving[kind]) > 1 else 0, start, stop - start - 1]
        device = kind if len(tables.kinds[kind].devices) == 1 else -1 - start
        times[device] = times.get(device, 0.0) + float(sum(tables.seconds[kind][start:stop]) + arriving)
        before = kind
    return sum(times.values()), max(times.values())


@pytest.mark.parametrize("micro_batches", [1, 2, 7])
@pytest.mark.parametrize("seed", range(25))
def test_the_fastest_way_is_that_of_all(seed: int, micro_batches: int) -> None:
    draw = random.Random(seed)
    tables = _tables(draw)
    most = draw.choice([np.inf, 0.75, 0.5])
    seconds = {way: once + (micro_batches - 1) * more for way, (once, more) in _ways(tables, most).items()}
    found = Fastest(tables, micro_batches, most).search()
    assert (found is None) == (not seconds)
    if found is not None:
        assert found.seconds == pytest.approx(min(seconds.values()), rel=1e-9)
        assert seconds[found.path] == pytest.approx(found.seconds, rel=1e-9)
        assert Fastest(tables, micro_batches, most).seconds_of(found.path) == pytest.approx(found.seconds, rel=1e-9)
        assert found.least_sum <= min(once for once, _ in _ways(tables, most).values()) + 1e-9


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("seed", range(25))
def test_a_way_within_a_limit_is_found_where_there_is_one(seed: int, micro_batches: int) -> None:
    draw = random.Random(seed)
    tables = _tables(draw)
    ways = _ways(tables)
    seconds = {way: once + (micro_batches - 1) * more for way, (once, more) in ways.items()}
    least = min((once for once, _ in ways.values()), default=0.0)
    search = Fastest(tables, micro_batches)
    for limit in [*sorted(set(seconds.values()))[:4], 1e9]:
        found = search.within(limit, least)
        assert (found is None) == (not seconds)
        assert found is None or seconds[found] <= limit
    assert search.within(min(seconds.values(), default=1.0) - 0.5, least) is None


def test_a_search_ends_with_what_is_enough_and_finds_nothing_beyond_its_limit() -> None:
    chain = Chain(((0,), (1,), (2,)), (), {})
    tables = Tables(
        (Kind((0, 1), 1),),
        chain,
        None,
        seconds=[np.array([2.0, 3.0, 4.0])],
        beside=[0.0],
        arriving=[np.zeros((1, 3, 3))],
        in_flight=lambda left: 1,
        width=3,
    )
    # On two devices the longest of 2 + 3 and 4 is 5: 9 + 5 seconds in place of 9 + 9 on one.
    search = Fastest(tables, micro_batches=2)
    best = search.search()
    assert best is not None
    assert (best.seconds, best.path, best.least_sum) == (14.0, ((0, 0, 2), (0, 2, 3)), 9.0)
    assert search.search(limit=13.9) is None
    enough = search.search(enough=18.0)
    assert enough is not None
    assert enough.seconds <= 18.0
