from __future__ import annotations

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.left_out import note_on_empty_devices
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile

# Whatever leaves a block takes a second over these links, and each block works for a second.
SLOW = [Device(f"gpu {index}", 100, link=1.0) for index in range(3)]
TIMED = Profile.from_costs([10] * 4, transfer=[1] * 4, forward_time=[1.0] * 4)


def test_a_plan_that_leaves_devices_empty_for_time_says_so() -> None:
    found = plan(TIMED, SLOW)
    assert set(found.assignment) == {found.root}
    empty = [index for index in range(3) if index != found.root]
    assert found.notes == (
        f"devices {empty[0]}, {empty[1]} stay empty: with them a step would be over 2% slower, or the fullest device "
        "no emptier; policy='balanced' levels memory over all devices, whatever time that takes",
    )
    assert found.notes[0] in " ".join(str(found).split())


@pytest.mark.parametrize("policy", ["balanced", "sequential"])
def test_other_policies_empty_no_device_for_time(policy: str) -> None:
    assert plan(TIMED, SLOW, policy=policy).notes == ()


def test_one_empty_device_is_named_alone_and_the_root_is_not_empty() -> None:
    (told,) = note_on_empty_devices([0, 0, 1], root=1, devices=3)
    assert told.startswith("device 2 stays empty: with it a step")
    assert note_on_empty_devices([0, 0, 1], root=2, devices=3) == ()


def test_devices_for_which_there_are_no_blocks_need_no_words() -> None:
    assert note_on_empty_devices([0, 1], root=1, devices=4) == ()
