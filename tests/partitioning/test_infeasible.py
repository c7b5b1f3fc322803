from __future__ import annotations

import random
import re

import pytest

import autobalance.partitioning.chains.problem as problem_module
from autobalance.devices.device import Device
from autobalance.devices.words import parse_devices
from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.chains.chain import build_chain
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.infeasible import devices_needed
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import BlockCost, Profile

GIB = 2**30


def _refused(profile: Profile, devices: list) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(profile, devices, recompute=False)
    return caught.value


def test_each_device_is_named_with_need_budget_and_what_is_missing() -> None:
    error = _refused(
        Profile.from_costs([6 * GIB, 5 * GIB, 5 * GIB, 6 * GIB], names=["embed", "a", "b", "head"]),
        [Device("cuda:0", 10 * GIB), Device("cuda:1", 11 * GIB)],
    )
    assert (error.need, error.budget, error.shortfall) == ((11 * GIB,) * 2, (10 * GIB, 11 * GIB), (GIB, 0))
    text = str(error)
    assert "device 0 (cuda:0): needs 11.00 GiB, may use 10.00 GiB, 1.00 GiB missing" in text
    assert "device 1 (cuda:1): needs 11.00 GiB, may use 11.00 GiB, enough" in text
    assert "The largest block is 'head': 6.00 GiB by itself." in text
    assert error.largest_block == "head"


def test_a_block_larger_than_any_device_is_to_be_split() -> None:
    text = str(_refused(Profile.from_costs([2, 20, 2]), [10, 10]))
    assert (
        "splitting 'block1' into several blocks: by itself it needs 20 B, and no device may use more than 10 B" in text
    )
    assert "more devices:" not in text


def test_the_number_of_devices_that_would_do_is_said() -> None:
    assert "more devices: 4 that may use 8 B each would do" in str(_refused(Profile.from_costs([4] * 8), [8, 8]))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ([2, 3, 4, 4, 3], {"pin": {"block0": 0, "block1": 0}}),
        ([2, 2, 2, 2], {"excess": [3]}),
        ([4, 4, 4], {"policy": "balanced_low_0", "pin": {"block0": 0}}),
    ],
)
def test_the_number_of_devices_that_would_do_counts_pins_and_excess(sizes: list[int], options: dict) -> None:
    profile = Profile.from_costs(sizes)
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(profile, [8], **options)
    found = re.search(r"more devices: (\d+) that may use 8 B each would do", str(caught.value))
    assert found is not None
    count = int(found[1])
    excess = options.pop("excess", [0])
    assert plan(profile, [8] * count, **options, excess=excess * count).fits
    with pytest.raises(InfeasiblePlanError):
        plan(profile, [8] * (count - 1), **options, excess=excess * (count - 1))


def test_more_devices_are_not_advised_against_pins_that_fill_one() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(Profile.from_costs([4, 4, 4]), [8], pin={"block0": 0, "block1": 0, "block2": 0})
    assert "more devices" not in str(caught.value)


def test_what_was_not_proved_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "MOST_COMBINATIONS", 1)
    text = str(_refused(Profile.from_costs([4] * 6, together=[(0, 5), (1, 3)]), [8, 8]))
    assert text.startswith("no plan was found that fits the devices; groups that must share a device are too many")


def test_groups_that_could_save_more_than_is_known_are_not_ruled_out() -> None:
    profile = Profile.from_costs([1] * 3, [20] * 3, transfer=[2, 2], together=[(0, 2)])
    with pytest.raises(InfeasiblePlanError, match="no plan was found that fits the devices; blocks that must share"):
        plan(profile, [50], recompute=True)


def test_a_smaller_batch_is_advised_only_where_it_can_be_enough() -> None:
    saved = str(_refused(Profile.from_costs([2] * 4, saved=[6] * 4), [10, 10]))
    assert "a smaller batch: 24 B (75%) are tensors saved for backward" in saved
    assert "recompute (activation checkpointing inside the blocks): up to 24 B" in saved
    static = str(_refused(Profile.from_costs([6] * 4, saved=[1] * 4), [10, 10]))
    assert "No batch is small enough: what stays" in static.split("What would help:")[0]
    assert "takes 24 B, all budgets together are 20 B" in static


def test_recomputation_is_not_advised_where_it_is_allowed_already() -> None:
    profile = Profile.from_costs([2] * 4, saved=[6] * 4)
    for recompute in (False, True):
        with pytest.raises(InfeasiblePlanError) as caught:
            plan(profile, [3, 3], recompute=recompute)
        assert ("recompute (activation checkpointing" in str(caught.value)) is not recompute


def test_freezing_is_advised_where_training_takes_memory() -> None:
    rows = Profile.from_costs([16] * 2)
    blocks = tuple(BlockCost(block.name, weights=4, gradients=4, optimizer=8) for block in rows.blocks)
    text = str(_refused(Profile(blocks, rows.timeline), [10, 10]))
    assert "freezing half of the blocks (requires_grad=False): about 12 B" in text


def test_devices_without_any_budget_are_named_too() -> None:
    error = _refused(Profile.from_costs([4, 4]), [0, 4])
    assert error.budget == (0, 4)
    assert sum(error.need) == 8


@pytest.mark.parametrize("seed", range(20))
def test_the_count_of_devices_is_the_first_that_works(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(3, 7))]
    profile = Profile.from_costs(sizes, together=[(0, len(sizes) - 1)] if rng.random() < 0.5 else [])
    budget = rng.randint(6, 12)
    problem = Problem(profile, build_chain(profile, {}, None, free_pins=False), parse_devices([1]), (1,))
    count = devices_needed(problem, budget)
    for devices in range(1, 9):
        if count is not None and devices >= count:
            assert plan(profile, [budget] * devices).fits
        else:
            _refused(profile, [budget] * devices)
