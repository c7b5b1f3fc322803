from __future__ import annotations

from autobalance.partitioning.chains.shared_values import EVERYWHERE, NOWHERE, Change, shared_values
from autobalance.profiling.timeline import Timeline


def _stages(changes: list[Change]) -> dict[tuple[int, int], int]:
    """Bytes that change in every stage `[start, stop)`, of those that change."""
    return {
        (start, stop): change
        for top, bottom, left, right, _, change in changes
        for start in range(top, bottom)
        for stop in range(max(left, start + 1), right)
    }


def test_storages_of_one_value_and_wholes_with_their_copies_belong_together() -> None:
    timeline = Timeline(
        sizes=(1,) * 7,
        owners=(0, 1, 2, 0, 1, 0, 1),
        values=(5, 5, 5, -1, -1, -1, -1),
        events=(),
        wholes=(-1, -1, -1, -1, 3, -1, 5),
    )
    together = shared_values(timeline, [0, 1, NOWHERE, 0, 1, 0, NOWHERE])
    assert sorted(together) == [0, 1, 3, 4], "a storage elsewhere shares with none, nor does what is left alone"
    assert together[0] is together[1]
    assert together[3] is together[4]
    assert together[0] is not together[3]


def test_a_second_holder_adds_only_to_stages_without_the_first() -> None:
    timeline = Timeline((10, 10), (0, 1), (5, 5), (1, 2, -1, -2))
    value = shared_values(timeline, [0, 1])[0]
    first = _stages(list(value.change(0, 10, born=True, units=2)))
    assert first == {(0, 1): 10, (0, 2): 10}
    second = _stages(list(value.change(1, 10, born=True, units=2)))
    assert second == {(1, 2): 10}
    gone = _stages(list(value.change(0, 10, born=False, units=2)))
    assert gone == {(0, 1): -10}, "the stage of both still holds the second"
    assert _stages(list(value.change(1, 10, born=False, units=2))) == {(0, 2): -10, (1, 2): -10}


def test_what_is_everywhere_leaves_nothing_for_the_others_to_add() -> None:
    timeline = Timeline((10, 10), (0, 1), (5, 5), (1, 2))
    value = shared_values(timeline, [EVERYWHERE, 0])[0]
    assert set(_stages(list(value.change(0, 10, born=True, units=2)))) == {(0, 1), (0, 2), (1, 2)}
    assert _stages(list(value.change(1, 10, born=True, units=2))) == {}
