from __future__ import annotations

import random
from itertools import combinations, permutations
from typing import Literal

import numpy as np
import pytest

from autobalance.partitioning.chains.sweep import Costs, Sweep, count_states

_Way = tuple[tuple[int, int, int], ...]


class _Instance:
    """Random costs `[kind, stages left][d, kind before, k]`, small whole numbers so that many ways are equally good."""

    def __init__(self, seed: int, *, by_kind_before: bool) -> None:
        draw = random.Random(seed)
        self.units = draw.randint(1, 6)
        self.counts = [draw.randint(1, 2) for _ in range(draw.randint(1, 3))]
        self.by_kind_before = by_kind_before and len(self.counts) > 1
        kinds, devices = len(self.counts), sum(self.counts)
        before = kinds + 1 if self.by_kind_before else 1
        width = draw.randint(1, self.units)
        table = (
            np.random.default_rng(seed).integers(0, 9, (kinds, devices + 1, width, before, self.units)).astype(float)
        )
        table[np.random.default_rng(seed + 1).random(table.shape) < 0.2] = np.inf
        self.table: Costs = table

    def cost_of(self, kind: int, left: int) -> Costs:
        return self.table[kind, left]

    def ways(self) -> set[_Way]:
        """All cuts on all orders of devices, told apart by kind."""
        kind_of = [kind for kind, count in enumerate(self.counts) for _ in range(count)]
        found: set[_Way] = set()
        for stages in range(1, min(self.units, len(kind_of)) + 1):
            for cuts in combinations(range(1, self.units), stages - 1):
                edges = (0, *cuts, self.units)
                for order in permutations(kind_of, stages):
                    found.add(tuple((kind, edges[at], edges[at + 1]) for at, kind in enumerate(order)))
        return found

    def costs(self, way: _Way) -> list[float]:
        found, before = [], -1  # the first stage reads the last row
        for number, (kind, start, stop) in enumerate(way):
            table = self.table[kind, len(way) - number]
            place = before if self.by_kind_before else 0
            found.append(float(table[stop - start - 1, place, start]) if stop - start <= len(table) else np.inf)
            before = kind
        return found


@pytest.mark.parametrize("combine", ["max", "sum"])
@pytest.mark.parametrize("by_kind_before", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_the_value_is_the_least_of_all_orders_and_cuts_and_the_path_has_it(
    seed: int, by_kind_before: bool, combine: Literal["max", "sum"]
) -> None:
    instance = _Instance(seed, by_kind_before=by_kind_before)
    together = max if combine == "max" else sum
    least = min(together(instance.costs(way)) for way in instance.ways())
    found = Sweep(instance.counts, instance.units, instance.cost_of, combine)
    assert found.value == least
    if np.isfinite(least):
        assert found.path in instance.ways(), "no kind has more stages than devices, and no unit is left out"
        assert together(instance.costs(found.path)) == least


@pytest.mark.parametrize("seed", range(25))
def test_the_least_without_a_kind_is_that_of_the_ways_that_do_not_use_it(seed: int) -> None:
    instance = _Instance(seed, by_kind_before=False)
    found = Sweep(instance.counts, instance.units, instance.cost_of, "max")
    for kind in range(len(instance.counts)):
        others = [way for way in instance.ways() if all(used != kind for used, _, _ in way)]
        assert found.least_without(kind) == min((max(instance.costs(way)) for way in others), default=np.inf)


def test_of_equal_ways_the_first_stages_are_the_longest() -> None:
    ones = np.ones((4, 1, 4))
    assert Sweep((3,), 4, lambda kind, left: ones, "max").path == ((0, 0, 4),)
    no_more_than_three = ones[:3]
    assert Sweep((3,), 4, lambda kind, left: no_more_than_three, "max").path == ((0, 0, 3), (0, 3, 4))


def test_a_chain_without_units_costs_nothing() -> None:
    found = Sweep((2,), 0, lambda kind, left: np.ones((1, 1, 0)), "sum")
    assert (found.value, found.path) == (0.0, ())


def test_states_are_the_counts_of_each_kind() -> None:
    assert count_states([4, 4]) == 25
    assert count_states([]) == 1
