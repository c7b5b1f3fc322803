"""Where steps run forward and backward, and which part of that is whose."""

from __future__ import annotations

import pytest

from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT, Timeline
from autobalance.timelines.passes import Pass, parts_of, passes_of

# Of three blocks: inputs, then gradients of them; block 0's input goes to block 2 as well, whose gradient comes early.
SKIP = Timeline(
    (4,) * 7,
    (0, 1, 2, 0, 2, 1, 0),
    (-1,) * 7,
    (1, 2, -2, 3, 5, 4, -5, 6, -6, 7),
    (("step 1 forward", 0), ("step 1 backward", 4), ("step 1 optimizer", 10)),
)


def test_a_stage_begins_with_the_first_storage_of_its_blocks() -> None:
    forward, backward = parts_of(SKIP, Pass(0, 4, 10), [(0, 1), (1, 2), (2, 3)])
    assert forward.tolist() == [0, 1, 3, 4]
    # The gradient that skips block 1 is made in block 2's part.
    assert backward.tolist() == [4, 5, 9, 10]


def test_a_stage_without_storages_has_an_empty_part() -> None:
    forward, backward = parts_of(SKIP, Pass(0, 4, 10), [(0, 3), (3, 4)])
    assert (forward.tolist(), backward.tolist()) == ([0, 4, 4], [4, 4, 10])


def test_accumulated_batches_are_passes_of_their_own() -> None:
    marks = [("step 1 forward", 1), ("step 1 backward", 2), ("step 1 forward", 5), ("step 1 backward", 6)]
    timeline = Timeline((4,) * 5, (ROOT, 0, ROOT, 0, 0), (-1,) * 5, (1, 2, -2, 3, -1, 4, -4), tuple(marks))
    # The second batch, which arrives at event 3, is not of the first one's backward.
    assert passes_of(timeline, training=True) == (Pass(1, 2, 3), Pass(5, 6, 7))


def test_backwards_that_follow_one_another_are_of_one_pass() -> None:
    marks = (("step 1 forward", 0), ("step 1 backward", 1), ("step 1 backward", 3), ("step 1 optimizer", 4))
    timeline = Timeline((4, 4), (0, 0), (-1, -1), (1, 2, -2, -1), marks)
    assert passes_of(timeline, training=True) == (Pass(0, 1, 4),)
    with pytest.raises(ValueError, match="the launch order has forwards alone, but a forward of the timeline has"):
        passes_of(timeline, training=False)


def test_a_forward_alone_has_no_backward() -> None:
    timeline = Timeline((4,), (0,), (-1,), (1, -1), (("step 1 forward", 0), ("step 2 forward", 1)))
    assert passes_of(timeline, training=False) == (Pass(0, 1, 1), Pass(1, 2, 2))
    with pytest.raises(ValueError, match="has no backward; marks: step 1 forward, step 2 forward"):
        passes_of(timeline, training=True)


def test_the_textbook_has_one_pass() -> None:
    assert passes_of(Profile.from_costs([4, 4], [1, 1]).timeline, training=True) == (Pass(2, 8, 14),)
