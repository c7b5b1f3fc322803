from __future__ import annotations

import pytest

from autobalance.profiling.timeline import ROOT, Timeline


def test_a_peak_is_the_highest_instant_not_the_sum() -> None:
    timeline = Timeline(sizes=(10, 7, 5), owners=(0, 0, 0), values=(-1, -1, -1), events=(1, 2, -2, 3))
    assert timeline.peaks([0, 0, 0], devices=1) == [17]


def test_copies_of_one_tensor_count_once_on_a_device_and_once_on_each() -> None:
    timeline = Timeline(sizes=(10, 10, 10), owners=(0, 1, 2), values=(3, 3, 3), events=(1, 2, 3))
    assert timeline.peaks([0, 0, 0], devices=1) == [10]
    assert timeline.peaks([0, 1, 1], devices=2) == [10, 10]


def test_a_tensor_outlives_its_original_while_a_copy_lives() -> None:
    # Original and copy on one device; the original dies, and 4 more bytes come while the copy holds it.
    timeline = Timeline(sizes=(10, 10, 4), owners=(0, 1, 1), values=(0, 0, -1), events=(1, 2, -1, 3, -2))
    assert timeline.peaks([0, 0, 0], devices=1) == [14]
    assert timeline.peaks([0, 1, 1], devices=2) == [10, 14]


def test_a_view_keeps_the_whole_storage_where_it_is_not_copied() -> None:
    # A copy of a part (4 of 10 bytes): on the original's device it is a view and keeps all 10 alive.
    timeline = Timeline(sizes=(10, 4), owners=(0, 1), values=(0, 0), events=(1, 2, -1))
    assert timeline.peaks([0, 0], 1, start=3) == [10]
    assert timeline.peaks([0, 1], 2, start=3) == [0, 4]


def test_what_is_on_no_device_counts_nowhere() -> None:
    timeline = Timeline(sizes=(10,), owners=(ROOT,), values=(-1,), events=(1,))
    assert timeline.peaks([-1], devices=1) == [0]


def test_a_window_starts_with_what_already_lives() -> None:
    timeline = Timeline(
        sizes=(10, 7, 3),
        owners=(0, 0, 0),
        values=(-1,) * 3,
        events=(1, 2, -2, 3, -3),
        marks=(("step 1 forward", 0), ("step 2 forward", 3), ("step 2 backward", 4)),
    )
    assert timeline.window(1) == (0, 3)
    assert timeline.window(2) == (3, 5)
    assert timeline.window(None) == (0, 5)
    assert timeline.peaks([0] * 3, 1, *timeline.window(1)) == [17]
    assert timeline.peaks([0] * 3, 1, *timeline.window(2)) == [13]
    with pytest.raises(ValueError, match="has no step 3; its marks are: step 1 forward, step 2 forward"):
        timeline.window(3)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"owners": (0, 0)}, "have 1, 2 and 1 entries"),
        ({"sizes": (-1,)}, "has -1 bytes"),
        ({"events": (2,)}, "speaks of storage 1, but there are 1"),
        ({"events": (0,)}, "speaks of storage -1"),
        ({"events": (1, 1)}, "event 1: storage 0 born while it lives"),
        ({"events": (-1,)}, "event 0: storage 0 dies while it is not alive"),
        ({"marks": (("step 1", 5),)}, "mark 'step 1' is at event 5, but there are 1 events"),
    ],
)
def test_a_timeline_that_contradicts_itself_is_refused(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Timeline(**{"sizes": (1,), "owners": (0,), "values": (-1,), "events": (1,), **fields})


def test_sizes_that_no_machine_has_are_refused() -> None:
    with pytest.raises(
        ValueError, match="the storages take 10000000000000000000 bytes together, more than any machine"
    ):
        Timeline((10**19,), (0,), (-1,), (1,))
