from __future__ import annotations

import numpy as np

from autobalance.partitioning.orders.cut_descent import MOST_NEIGHBOURS, descend, neighbours
from autobalance.partitioning.orders.rounds import Costs, Cuts, Ways


def _sizes(cuts: Cuts, units: int) -> list[int]:
    return np.diff([0, *cuts, units]).tolist()


def test_each_neighbour_gives_one_unit_from_one_stage_to_another_and_leaves_none_empty() -> None:
    found = {tuple(_sizes(tuple(cuts), 7)) for cuts in neighbours((2, 3, 5), 7).tolist()}
    assert found == {
        (1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 2, 3), (3, 1, 1, 2), (3, 1, 2, 1),
        (2, 2, 1, 2), (2, 2, 2, 1), (2, 1, 1, 3), (2, 1, 3, 1),
    }  # fmt: skip


def test_cuts_that_are_fixed_stay() -> None:
    assert all(cuts[1] == 3 for cuts in neighbours((2, 3, 5), 7, frozenset({1})).tolist())
    assert len(neighbours((2, 3, 5), 7, frozenset({1}))) == 3


def test_a_chain_in_one_stage_has_no_neighbours_and_one_in_many_has_not_too_many() -> None:
    assert len(neighbours((), 4)) == 0
    assert len(neighbours(tuple(range(2, 800, 2)), 800)) <= 2 * MOST_NEIGHBOURS


def test_the_descent_goes_to_the_least_cost_by_the_first_entries_that_differ() -> None:
    def costs(ways: Ways) -> Costs:
        sizes = np.diff(np.pad(ways, ((0, 0), (1, 1)), constant_values=(0, 11)), axis=1)
        return np.column_stack([(sizes**2).sum(axis=1), ways[:, 0]]).astype(np.float64)

    def near(cuts: Cuts) -> Ways:
        return neighbours(cuts, 11)

    # 3, 4 and 4 units: of the three ways with the least squares the one with the fewest units first.
    assert descend([(1, 2), (6, 10)], costs, near, steps=50) == ((3, 7), (41.0, 3.0))
    assert descend([(1, 2)], costs, near, steps=1) == ((1, 3), (1.0 + 2**2 + 8**2, 1.0))
