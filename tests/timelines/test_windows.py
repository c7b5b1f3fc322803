from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import Timeline
from autobalance.timelines.splice import repeated
from autobalance.timelines.windows import Turns

# Three blocks, each with weights (storages 1 to 3), what forward saves (4 to 6) and a gradient (7 to 9), and a tensor
# of the root in each block's forward (10 to 12).
SIZES = (10,) * 3 + (20,) * 3 + (30,) * 3 + (40,) * 3
OWNERS = (0, 1, 2) * 3 + (-1,) * 3
PLACED, FORWARD = (1, 2, 3), (4, 10, -10, 5, 11, -11, 6, 12, -12)
BACKWARD = (9, -6, 8, -9, -5, 7, -8, -4, -7)
MARKS = (("step 1 forward", 3), ("step 1 backward", 12))
TIMELINE = Timeline(SIZES, OWNERS, (-1,) * 12, PLACED + FORWARD + BACKWARD, MARKS)


def test_turns_rise_in_forward_and_fall_in_backward() -> None:
    placed, forward, backward = Turns(TIMELINE, 1).find()
    assert (placed.start, placed.length, placed.rises) == (1, 1, True)
    assert (forward.start, forward.length, forward.rises) == (6, 3, True)
    # Gradient of 1, release of that of 2, release of what 1 saved; 2's turn has no gradient of a next one to release.
    assert (backward.start, backward.length, backward.rises) == (14, 3, False)


def test_a_copy_comes_between_and_refers_to_its_own_neighbours() -> None:
    blocks = tuple(BlockCost(f"layers.{index}") for index in range(3))
    deep = repeated(Profile(blocks, TIMELINE), "layers.1", 1).timeline
    # Storages are numbered in the order of their births: weights, saved and root's of each layer, then gradients.
    forward = (5, 6, -6, 7, 8, -8, 9, 10, -10, 11, 12, -12)
    backward = (13, -11, 14, -13, -9, 15, -14, -7, 16, -15, -5, -16)
    assert deep.events == (1, 2, 3, 4, *forward, *backward)
    assert deep.owners == (0, 1, 2, 3, 0, -1, 1, -1, 2, -1, 3, -1, 3, 2, 1, 0)
    assert deep.marks == (("step 1 forward", 4), ("step 1 backward", 16))


def test_blocks_that_are_not_equal_have_no_turns() -> None:
    with pytest.raises(ValueError, match="the block and the one after it do not hold the same storages"):
        Turns(replace(TIMELINE, sizes=(10, 10, 11, *SIZES[3:])), 1)


def test_events_that_do_not_repeat_are_told() -> None:
    events = (*PLACED, 5, -5, 6, 4)
    with pytest.raises(ValueError, match="event 3 is the block's, but nothing like it follows or went before"):
        Turns(replace(TIMELINE, events=events, marks=MARKS[:1]), 1).find()
