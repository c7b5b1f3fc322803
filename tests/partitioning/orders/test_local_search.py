from __future__ import annotations

import random
from itertools import product

import pytest

from autobalance.partitioning.orders.local_search import improve, placement_moves


def test_items_move_to_every_device_and_change_places() -> None:
    assert list(placement_moves((0, 2, 1), movable=[0, 2], devices=3)) == [
        (1, 2, 1),
        (2, 2, 1),
        (0, 2, 0),
        (0, 2, 2),
        (1, 2, 0),
    ]


@pytest.mark.parametrize("seed", range(10))
def test_the_end_is_better_than_all_its_neighbours_and_always_the_same(seed: int) -> None:
    rng = random.Random(seed)
    costs = {places: (float(rng.randint(0, 50)),) for places in product(range(3), repeat=4)}

    def neighbours(places: tuple[int, ...]) -> list[tuple[int, ...]]:
        return list(placement_moves(places, range(4), 3))

    best, least = improve((0, 0, 0, 0), costs.__getitem__, neighbours)
    assert least == costs[best] <= costs[0, 0, 0, 0]
    assert all(costs[places] >= least for places in neighbours(best))
    assert improve((0, 0, 0, 0), costs.__getitem__, neighbours) == (best, least)


def test_no_more_are_judged_than_allowed() -> None:
    judged = []

    def cost(places: tuple[int, ...]) -> tuple[float, ...]:
        judged.append(places)
        return (-float(sum(places)),)

    improve((0,) * 6, cost, lambda places: placement_moves(places, range(6), 9), tries=5)
    assert len(judged) == 6  # the start, and five more
