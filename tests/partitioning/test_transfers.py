from __future__ import annotations

import random

import pytest

from autobalance.partitioning.transfers import Crossing, bytes_moved, crossings_of, received
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import ROOT, Timeline


def test_a_profile_by_hand_passes_each_output_to_the_next_block_and_the_last_to_the_root() -> None:
    profile = Profile.from_costs([4, 4, 4], transfer=[2, 0, 5])
    assert crossings_of(profile) == (Crossing(0, (1,), 2, True), Crossing(2, (ROOT,), 5, True))


def test_inference_by_hand_sends_nothing_back_and_takes_its_batch_from_the_root() -> None:
    blocks = (BlockCost("a", inputs=7, outputs=3), BlockCost("b"))
    profile = Profile(blocks, Timeline((), (), (), ()), training=False)
    assert crossings_of(profile) == (Crossing(ROOT, (0,), 7, False), Crossing(0, (1,), 3, False))


def _profile(timeline: Timeline, blocks: int) -> Profile:
    return Profile(tuple(BlockCost(f"block{index}") for index in range(blocks)), timeline)


def test_copies_that_live_together_are_one_tensor_and_one_that_is_made_again_crosses_again() -> None:
    # Block 0's tensor is copied to 1 and, while that copy lives, to 2; both die before it is copied to 3.
    timeline = Timeline((10,) * 4, (0, 1, 2, 3), (0,) * 4, (1, 2, 3, -2, -3, 4, -4, -1))
    assert crossings_of(_profile(timeline, 4)) == (Crossing(0, (1, 2), 10, False), Crossing(0, (3,), 10, False))


def test_copies_in_the_backward_are_gradients_of_what_went_the_other_way_and_else_cross_by_themselves() -> None:
    # Forward: 0 -> 1 and 0 -> 2. Backward: a gradient 2 -> 0, and the input of block 1 once more for a checkpoint.
    timeline = Timeline(
        sizes=(16,) * 6,
        owners=(0, 1, 2, 2, 0, 1),
        values=(0, 0, 0, 1, 1, 0),
        events=(1, 2, 3, 4, 5, 6),
        marks=(("step 1 forward", 0), ("step 1 backward", 3)),
        fixed=(10,) * 6,
    )
    found = crossings_of(_profile(timeline, 3))
    assert sorted(found, key=str) == [
        Crossing(0, (1,), 10, False),
        Crossing(0, (1,), 10, False),
        Crossing(0, (2,), 10, True),
    ]


def test_only_the_last_step_counts_and_bytes_are_those_of_the_batch() -> None:
    timeline = Timeline(
        sizes=(512,) * 4,
        owners=(0, 1, 0, 1),
        values=(0, 0, 1, 1),
        events=(1, 2, -1, -2, 3, 4),
        marks=(("step 1 forward", 0), ("step 2 forward", 4)),
        fixed=(3,) * 4,
        per_sample=(5,) * 4,
    )
    profile = Profile((BlockCost("a"), BlockCost("b")), timeline, batch_size=2)
    assert crossings_of(profile) == (Crossing(0, (1,), 13, False),)
    assert crossings_of(profile.scaled(4)) == (Crossing(0, (1,), 23, False),)


def test_a_part_of_a_tensor_crosses_with_its_own_bytes() -> None:
    timeline = Timeline((10, 4, 4), (0, 1, 2), (-1, 3, 3), (1, 2, 3), wholes=(-1, 0, 0))
    assert crossings_of(_profile(timeline, 3)) == (Crossing(0, (1, 2), 4, False),)


def test_workspaces_that_devices_share_do_not_cross() -> None:
    timeline = Timeline((9, 9), (0, 1), (0, 0), (1, 2), scratch=(0, 1))
    assert crossings_of(_profile(timeline, 2)) == ()


def test_bytes_moved_count_each_device_once_and_gradients_the_other_way() -> None:
    crossings = [Crossing(0, (1, 2, 3), 10, True), Crossing(ROOT, (0,), 3, False), Crossing(3, (ROOT,), 1, True)]
    assert bytes_moved(crossings, [0, 1, 1, 0], root=2) == {(0, 1): 10, (1, 0): 10, (2, 0): 4, (0, 2): 1}


@pytest.mark.parametrize("seed", range(40))
def test_the_stages_of_a_plan_receive_together_what_it_moves(seed: int) -> None:
    rng = random.Random(seed)
    blocks, devices = rng.randint(2, 7), rng.randint(2, 4)
    owners = [*range(blocks), ROOT]
    crossings = []
    for _ in range(rng.randint(1, 12)):
        source, *targets = rng.sample(owners, rng.randint(2, len(owners)))
        crossings.append(Crossing(source, tuple(targets), rng.randint(1, 9), rng.random() < 0.5))
    # Some owners stand beside the chain; the root does, or is the last unit's.
    apart = rng.sample(range(blocks), rng.randint(0, blocks - 1))
    units = [(block,) for block in range(blocks) if block not in apart]
    items = {block: rng.randrange(devices) for block in apart}
    root = rng.randrange(devices)
    if rng.random() < 0.5:
        items[ROOT] = root
    else:
        units[-1] = (*units[-1], ROOT)
        root = devices - 1
    cuts = [0, *sorted(rng.choices(range(len(units) + 1), k=devices - 1)), len(units)]
    device_of = {block: device for block, device in items.items() if block != ROOT}
    total = 0
    for device in range(devices):
        start, stop = cuts[device], cuts[device + 1]
        device_of.update({owner: device for unit in units[start:stop] for owner in unit if owner != ROOT})
        if any(ROOT in unit for unit in units[start:stop]):
            root = device
        here = [owner for owner, place in items.items() if place == device]
        total += received(crossings, units, True, here)[start, stop]
    moved = bytes_moved(crossings, [device_of[block] for block in range(blocks)], root)
    assert total == sum(moved.values())


@pytest.mark.parametrize("seed", range(20))
def test_every_stage_receives_what_looking_at_its_owners_says(seed: int) -> None:
    rng = random.Random(seed)
    units = [(0,), (1, 2), (3,), (4, ROOT)]
    owners = [0, 1, 2, 3, 4, ROOT]
    crossings = []
    for _ in range(8):
        source, *targets = rng.sample(owners, rng.randint(2, 5))
        crossings.append(Crossing(source, tuple(targets), rng.randint(1, 9), rng.random() < 0.5))
    for training in (True, False):
        matrix = received(crossings, units, training)
        for start in range(5):
            for stop in range(start, 5):
                inside = {owner for unit in units[start:stop] for owner in unit}
                expected = sum(
                    crossing.nbytes * (2 if training and crossing.has_gradient else 1)
                    for crossing in crossings
                    if crossing.source not in inside and inside & set(crossing.targets)
                )
                assert matrix[start, stop] == expected


def test_without_gradients_each_input_comes_in_once() -> None:
    crossings = [Crossing(0, (1,), 10, True)]
    assert received(crossings, [(0,), (1,)], training=False)[1, 2] == 10
    assert received(crossings, [(0,), (1,)], training=True)[1, 2] == 20


def test_what_goes_to_a_root_elsewhere_counts_with_the_stage_that_sends_it() -> None:
    crossings = [Crossing(1, (ROOT,), 10, False)]
    assert received(crossings, [(0,), (1,)], True).tolist()[1] == [0, 0, 10]
    assert received(crossings, [(0,), (1,)], True, beside=(ROOT,)).tolist()[1] == [0, 0, 0]
