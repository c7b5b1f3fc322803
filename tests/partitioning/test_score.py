from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.score import score
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile

PROFILE = Profile.from_costs(
    [4, 3, 2, 1], names=["embed", "layers.0", "layers.1", "head+norm"], forward_time=[1] * 4, together=[(0, 3)]
)


def test_parents_blocks_and_parts_are_understood_as_accelerate_writes_them() -> None:
    found = score(PROFILE, {"embed": 0, "layers": 1, "head": 0, "norm": 0}, "2x1KiB")
    assert found.assignment == (0, 1, 1, 0)
    assert found.peaks == (5, 5)
    assert found.fits
    assert found.root == 0


def test_a_module_whose_own_name_holds_a_plus_is_found() -> None:
    found = score(
        Profile.from_costs([4, 3], names=["fields.user+item", "head"]), {"fields.user+item": 0, "head": 1}, [9] * 2
    )
    assert (found.assignment, found.notes) == ((0, 1), ())


def test_the_nearest_parent_decides() -> None:
    assert score(PROFILE, {"": 0, "layers": 1, "layers.0": 0}, [9, 9]).assignment == (0, 0, 1, 0)


def test_devices_may_be_written_with_their_type() -> None:
    assert score(PROFILE, {"": "cuda:0", "layers": "cuda:1"}, [9, 9]).assignment == (0, 1, 1, 0)


def test_a_list_gives_one_device_for_each_block() -> None:
    assert score(PROFILE, [0, 0, 1, 0], [9, 9]).peaks == (8, 2)
    with pytest.raises(ValueError, match="2 devices are given for 4 blocks"):
        score(PROFILE, [0, 0], [9, 9])


def test_over_budget_does_not_fit() -> None:
    found = score(PROFILE, {"": 0}, [9, 9])
    assert not found.fits
    assert found.uses == (10 / 9, 0.0)


def test_a_block_split_over_devices_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"splits block 'layers.0' over devices: 'layers.0.mlp' on 1 and 'layers' on 0"
    ):
        score(PROFILE, {"": 0, "layers": 0, "layers.0.mlp": 1}, [9, 9])
    with pytest.raises(ValueError, match=r"splits block 'head\+norm' over devices: 'head' on 0 and 'norm' on 1"):
        score(PROFILE, {"embed": 0, "layers": 0, "head": 0, "norm": 1}, [9, 9])


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offload_is_named(place: str) -> None:
    with pytest.raises(ValueError, match=f"'head' is on '{place}'; only plans without offload are scored"):
        score(PROFILE, {"": 0, "head": place}, [9, 9])


def test_what_the_map_leaves_out_is_named() -> None:
    with pytest.raises(ValueError, match="says nothing about block 'embed'"):
        score(PROFILE, {"layers": 0, "head": 0, "norm": 0}, [9, 9])


def test_devices_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match="'head' is on 2; devices are positions in the list of devices, here 0 to 1"):
        score(PROFILE, {"": 0, "head": 2}, [9, 9])


@pytest.mark.parametrize(("device_map", "text"), [("auto", "not 'auto'"), (None, "not None"), ({0: 1}, "the key 0")])
def test_what_is_no_map_is_refused_in_words(device_map: object, text: str) -> None:
    with pytest.raises(TypeError, match=f"device_map .*{text}"):
        score(PROFILE, device_map, "2x1KiB")  # type: ignore[arg-type] # the wrong type is what is tested


def test_names_that_do_not_count_and_groups_pulled_apart_are_noted() -> None:
    found = score(PROFILE, {"": 0, "dropout": 1, "embed": 1}, [9, 9])
    assert found.notes == (
        "names that are no block and not loose do not count: dropout",
        "embed, head+norm must share a device; what they share is counted once, with its owner",
    )


def test_stages_times_and_bytes_that_move_are_told() -> None:
    profile = Profile.from_costs([1] * 3, forward_time=[1, 2, 3], backward_time=[2, 4, 6], transfer=[10, 20, 40])
    devices = [Device("a", 9, link=10.0), Device("b", 9, link=5.0)]
    found = score(profile, [0, 1, 1], devices)
    assert [(stage.start, stage.stop, stage.device, stage.received) for stage in found.stages] == [
        (0, 1, 0, 0),
        (1, 3, 1, 20),
    ]
    assert (found.transferred, found.step_time) == (20, 18 + 20 / 5)
    assert found.reserved == ()  # it was not asked for


def test_micro_batches_run_at_once_and_hold_what_is_in_flight() -> None:
    profile = Profile.from_costs(
        [1, 1], saved=[8, 8], forward_time=[4, 8], backward_time=[4, 8], transfer=[16], batch_size=8
    )
    devices = [Device("a", 99, link=8.0), Device("b", 99, link=8.0)]
    found = score(profile, [0, 1], devices, micro_batches=4, schedule="1f1b")
    # Of 2 samples: stages of 2 and 4 seconds; 4 bytes there and back over 8 bytes per second; 2 bytes saved each.
    assert found.step_time == 2 + (4 + 1) + 3 * (4 + 1)
    assert [stage.in_flight for stage in found.stages] == [2, 1]
    assert found.peaks == (1 + 2 * 2, 1 + 2)
    assert found.transferred == 2 * 16
    assert score(profile, [0, 1], devices, micro_batches=4, schedule="gpipe").peaks == (9, 9)


@pytest.mark.parametrize(
    ("micro_batches", "schedule", "text"),
    [
        (0, "gpipe", "micro_batches=0; a batch is split into 1 part or more"),
        (2, "naive", "schedule='naive' runs the whole batch at once, not in 2 parts"),
        (9, "gpipe", "8 samples cannot be split into 9 micro-batches; choose up to 8"),
    ],
)
def test_micro_batches_that_cannot_be_are_refused(micro_batches: int, schedule: str, text: str) -> None:
    profile = Profile.from_costs([1, 1], batch_size=8)
    with pytest.raises(ValueError, match=text):
        score(profile, [0, 1], [9, 9], micro_batches=micro_batches, schedule=schedule)


def test_the_allocator_of_a_device_takes_whole_segments() -> None:
    profile = Profile.from_costs([4 * 2**20, 3 * 2**20])
    # From 1 MiB on, the caching allocator takes segments of 20 MiB.
    assert score(profile, [0, 1], "2x1GiB", reserved=True).reserved == (20 * 2**20, 20 * 2**20)
    with pytest.raises(ValueError, match="has no caching allocator that reserves memory; leave out reserved=True"):
        score(replace(profile, granule=1), [0, 1], "2x1GiB", reserved=True)


@pytest.mark.parametrize("seed", range(20))
def test_a_plans_own_map_scores_as_the_plan_says(seed: int, random_profile) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, 5)
    found = plan(profile, [profile.peak()] * 3)
    judged = score(profile, found.device_map, [profile.peak()] * 3)
    assert (judged.assignment, judged.peaks, judged.budgets) == (found.assignment, found.peaks, found.budgets)
    assert judged.step_time == found.step_time
