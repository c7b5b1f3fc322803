from __future__ import annotations

import random

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
        ({"events": (1, -1, -1)}, "event 2: storage 0 dies while it is not alive"),
        ({"casts": (1,)}, "casts names storage 1, but there are 1 storages"),
        ({"gradients": ((0, 1),)}, "gradients names storages that there are not; there are 1"),
        ({"events": (-1,)}, "event 0: storage 0 dies while it is not alive"),
        ({"marks": (("step 1", 5),)}, "mark 'step 1' is at event 5, but there are 1 events"),
        ({"per_sample": (1,)}, "fixed and per_sample have 0 and 1 entries; each describes all 1 storages, or none"),
        ({"fixed": (1, 1)}, "fixed and per_sample have 2 and 0 entries"),
        ({"scratch": (1,)}, "scratch names storage 1, but there are 1 storages"),
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


def peaks_one_by_one(
    timeline: Timeline, homes: list[int], devices: int, start: int = 0, stop: int | None = None
) -> list[int]:
    """The definition: one event after the other."""
    used, peaks = [0] * devices, [0] * devices
    holders: dict[tuple[int, int], tuple[int, int]] = {}  # of each device and value: storages alive, bytes they take
    last = len(timeline.events) if stop is None else stop
    for position, event in enumerate(timeline.events[:last]):
        if position == start:
            peaks = used.copy()
        storage = abs(event) - 1
        device, size, value = homes[storage], timeline.sizes[storage], timeline.values[storage]
        if device < 0:
            continue
        count, taken = holders.get((device, value), (0, size)) if value >= 0 else (0 if event > 0 else 1, size)
        count += 1 if event > 0 else -1
        if value >= 0:
            holders[device, value] = (count, taken)
            if count == 0:
                del holders[device, value]
        if count == 1 and event > 0:
            used[device] += taken
            peaks[device] = max(peaks[device], used[device])
        elif count == 0:
            used[device] -= taken
    return peaks if start < last else used


@pytest.mark.parametrize("seed", range(200))
def test_peaks_equal_those_of_going_through_the_events_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    count, devices = draw.randint(1, 12), draw.randint(1, 4)
    alive, events = set[int](), []
    for _ in range(draw.randint(0, 80)):  # a storage may be born again after its death
        storage = draw.randrange(count)
        events.append(-(storage + 1) if storage in alive else storage + 1)
        alive ^= {storage}
    timeline = Timeline(
        sizes=tuple(draw.choice([0, 1, 5, 512, 10**12]) for _ in range(count)),
        owners=(0,) * count,
        values=tuple(draw.choice([-1, 0, 1, 2]) for _ in range(count)),
        events=tuple(events),
    )
    homes = [draw.randint(-1, devices - 1) for _ in range(count)]
    assert timeline.peaks(homes, devices) == peaks_one_by_one(timeline, homes, devices)
    for _ in range(5):
        start, stop = sorted(draw.choices(range(len(events) + 1), k=2))
        assert timeline.peaks(homes, devices, start, stop) == peaks_one_by_one(timeline, homes, devices, start, stop)


STEPS = Timeline(
    sizes=(10, 7, 3, 20, 30),
    owners=(0,) * 5,
    values=(-1,) * 5,
    events=(1, 2, -2, 3, 4, -4, 2, 5, -5, -2),
    marks=(
        ("step 1 forward", 1),
        ("step 1 backward", 2),
        ("step 1 optimizer", 3),
        ("step 2 forward", 6),
        ("step 2 optimizer", 7),
        ("end", 10),
    ),
)


def test_phases_of_a_step_are_stretches_between_marks() -> None:
    assert STEPS.steps == (1, 2)
    assert STEPS.spans(1, "forward+backward") == [(1, 2), (2, 3)]
    assert STEPS.spans(1, "optimizer") == [(3, 6)]
    assert STEPS.spans(None, "optimizer") == [(3, 6), (7, 10)]
    with pytest.raises(ValueError, match="phase='backward' does not exist; choose 'forward"):
        STEPS.spans(1, "backward")
    with pytest.raises(ValueError, match="step 1 has no phase 'optimizer'; the marks of the profile are: step 1 forw"):
        Timeline((1,), (0,), (-1,), (1,), (("step 1 forward", 0),)).spans(1, "optimizer")


def test_another_batch_takes_other_bytes_rounded_up_to_the_granule() -> None:
    timeline = Timeline((512, 512, 512), (0,) * 3, (-1,) * 3, (1, 2, 3), (), (100, 0, -600), (0, 100, 200))
    assert timeline.scaled(6, granule=512).sizes == (512, 1024, 1024)
    assert timeline.scaled(6, granule=1).sizes == (100, 600, 600)
    assert timeline.scaled(3, granule=1).sizes == (100, 300, 0)
    with pytest.raises(ValueError, match="does not know its bytes as a function of the batch"):
        STEPS.scaled(6, granule=512)


def test_devices_are_asked_to_give_cached_memory_back_where_it_was_emptied() -> None:
    timeline = Timeline((512, 1024), (0, 1), (-1, -1), (1, 2, -2, -1), emptied=(0, 3, 3, 4))
    there = [(-1, 0), (0, 512), (-1, 0), (-1, 0), (0, -512), (-1, 0)]
    assert timeline.requests([0, 1], devices=2)[0] == there
    assert timeline.requests([0, 1], devices=2, stop=1) == [[(-1, 0), (0, 512)], [(-1, 0)]]


def test_emptied_speaks_of_events_that_exist() -> None:
    with pytest.raises(ValueError, match=r"emptied=\(3,\) speaks of events, but there are 2"):
        Timeline((512,), (0,), (-1,), (1, -1), emptied=(3,))


def test_a_copy_of_a_part_is_a_view_where_the_whole_is_and_a_storage_of_its_own_elsewhere() -> None:
    # Blocks 1 and 2 are given one part of block 0's 10 bytes, which then dies; block 3 a copy of block 1's copy.
    timeline = Timeline(
        sizes=(10, 4, 4, 4),
        owners=(0, 1, 2, 3),
        values=(-1, 0, 0, 0),
        events=(1, 2, 3, 4, -1),
        wholes=(-1, 0, 0, 1),
    )
    assert timeline.peaks([0, 0, 1, 0], 2) == [10, 4]
    assert timeline.peaks([0, 0, 1, 0], 2, start=5) == [10, 4]  # the view keeps the whole
    assert timeline.peaks([0, 1, 1, 1], 2, start=5) == [0, 4]  # one copy for all three
    assert timeline.peaks([0, 1, 0, 0], 2, start=5) == [14, 4]  # block 3's comes back from device 1
    assert timeline.requests([0, 0, 1, 0], 2) == [[(0, 10)], [(2, 4)]]
    with pytest.raises(ValueError, match="wholes names for every storage an earlier one, or -1"):
        Timeline((1,), (0,), (-1,), (1,), wholes=(0,))
