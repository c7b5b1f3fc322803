from __future__ import annotations

import pytest

from autobalance.schedules.launches import Launch, launch_order
from autobalance.timelines.launched import Manner, launched_of

STAGES = [(0, 1), (1, 3)]


def _there(stage: int, micro_batch: int) -> Launch:
    return Launch(stage, micro_batch, backward=False)


def _back(stage: int, micro_batch: int) -> Launch:
    return Launch(stage, micro_batch, backward=True)


@pytest.mark.parametrize(
    ("schedule", "training", "manner"),
    [
        ("gpipe", True, Manner.ONE_GRAPH),
        ("1f1b", True, Manner.OVERLAPPING),
        ("1f1b", False, Manner.ONE_GRAPH),
    ],
)
def test_schedules_share_a_step_in_their_manner(schedule: str, training: bool, manner: Manner) -> None:
    order = launch_order(schedule, 2, 3, training=training)
    assert launched_of(order, STAGES, 3).manner is manner


def test_one_after_the_other_is_a_manner_of_its_own() -> None:
    order = [launch for m in (4, 2) for launch in (_there(0, m), _there(1, m), _back(1, m), _back(0, m))]
    found = launched_of(order, STAGES, 3)
    assert found.manner is Manner.IN_TURN
    # Micro-batches are numbered as they begin; parts are two forwards, and two backwards from the last stage on.
    assert found.copies.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.parts.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert found.is_first.tolist() == [True] * 4 + [False] * 4
    assert found.is_last.tolist() == [False] * 4 + [True] * 4


def test_the_leader_of_a_backward_need_not_be_the_first_that_went_forward() -> None:
    order = [_there(0, 0), _there(1, 0), _there(0, 1), _there(1, 1), _back(1, 1), _back(0, 1), _back(1, 0), _back(0, 0)]
    found = launched_of(order, STAGES, 3)
    assert found.leaders.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("order", "stages", "text"),
    [
        ([_there(0, 0)], [(0, 2)], "are not the 3 blocks in call order"),
        ([_there(0, 0)], [(0, 2), (1, 3)], "are not the 3 blocks in call order"),
        ([_there(2, 0)], STAGES, "launches stage 2 of 2 stages"),
        ([_there(0, 0)], STAGES, "1 launches of 1 micro-batches in 2 stages"),
        ([_there(0, 0), _there(1, 0), _back(1, 0)], STAGES, "once backward in every stage or in none"),
    ],
)
def test_launches_that_do_not_fit_their_stages_are_refused(
    order: list[Launch], stages: list[tuple[int, int]], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        launched_of(order, stages, 3)
