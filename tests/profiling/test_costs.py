"""Whose every byte is."""

from __future__ import annotations

import pytest

from autobalance.profiling.costs import call_order
from autobalance.profiling.timeline import ROOT, Timeline
from autobalance.profiling.walk import walk


@pytest.mark.parametrize(
    ("called", "count", "expected"),
    [
        ([0, 1, 2], 3, [0, 1, 2]),
        ([2, 0, 1], 3, [2, 0, 1]),
        ([2, 0], 3, [2, 0, 1]),
        ([1, 2], 3, [0, 1, 2]),
        ([], 3, [0, 1, 2]),
    ],
)
def test_blocks_that_are_never_called_stay_behind_their_predecessor(
    called: list[int], count: int, expected: list[int]
) -> None:
    assert call_order(called, count) == expected


def test_walk_tells_what_a_stretch_was_born_with_and_left() -> None:
    timeline = Timeline(
        sizes=(10, 5, 20, 3),
        owners=(0, 0, 1, ROOT),
        values=(-1, -1, -1, -1),
        events=(1, 2, 3, -2, 4, -3),
    )
    stretch = walk(timeline, 2, 1, 5)
    assert stretch.before == {0}
    assert stretch.born == {1, 2, 3}
    assert stretch.after == {0, 2, 3}
    # What is on the root device stands in the row of the last block.
    assert (stretch.first, stretch.peak, stretch.last) == ((10, 0), (15, 23), (10, 23))


def test_empty_stretch_is_what_was_there() -> None:
    timeline = Timeline(sizes=(10,), owners=(0,), values=(-1,), events=(1,))
    stretch = walk(timeline, 1, 1, 1)
    assert stretch.before == stretch.after == {0}
    assert stretch.first == stretch.peak == stretch.last == (10,)
