from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.devices.device import Device
from autobalance.devices.roofline import Work
from autobalance.partitioning.chains.chain import Chain, Item
from autobalance.partitioning.chains.stage_costs import StageCosts
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT

PROFILE = Profile.from_costs(
    [1, 2, 4, 8], saved=[10, 20, 40, 80], transient=[0, 5, 0, 0], forward_time=[1, 2, 3, 4], backward_time=[2, 2, 2, 2]
)
# Blocks 0 and 2 share a device, wherever that is.
CHAIN = Chain(((1,), (3, ROOT)), (Item((0, 2), None),), {})
DEVICES = (Device("a", 99, flops=2e12), Device("b", 99, flops=1e12))


def _costs(profile: Profile = PROFILE, schedule: str = "naive", micro_batches: int = 1) -> StageCosts:
    return StageCosts(profile, CHAIN, DEVICES, (99, 99), schedule=schedule, micro_batches=micro_batches)


def test_peaks_are_those_of_units_of_items_and_of_both() -> None:
    costs = _costs()
    assert costs.unit_peaks().tolist() == [2 + 20 + 5, 8 + 80]
    assert costs.item_peak(0) == 1 + 4 + 10 + 40
    assert costs.peaks(frozenset())[0, 2] == 2 + 8 + 20 + 80
    assert costs.peaks(frozenset({0}))[0, 1] == 1 + 2 + 4 + 10 + 20 + 40


def test_times_by_hand_hold_for_the_fastest_device() -> None:
    first, second = _costs().block_seconds
    assert first.tolist() == [3.0, 4.0, 5.0, 6.0]
    assert second.tolist() == [6.0, 8.0, 10.0, 12.0]


def test_a_step_takes_no_less_than_launching_all_of_its_kernels() -> None:
    work = Work(launches=100)
    blocks = (replace(PROFILE.blocks[0], forward_work=(work,), backward_work=(work, work)), *PROFILE.blocks[1:])
    costs = _costs(replace(PROFILE, blocks=blocks), "1f1b", 4)
    assert costs.floor == pytest.approx(4 * 300 * DEVICES[0].launch_time)


def test_what_waits_for_a_backward_is_in_flight_or_else_all_results() -> None:
    assert [_costs(schedule="1f1b", micro_batches=3).in_flight(left) for left in (1, 2, 9)] == [1, 2, 3]
    forwards = replace(PROFILE, training=False)
    assert [_costs(forwards, "1f1b", 3).in_flight(left) for left in (1, 2, 9)] == [3, 3, 3]


def test_units_of_the_chain_grow_by_what_they_hold_themselves() -> None:
    growth = _costs().growth
    assert growth.held.tolist() == [[2, 8], [22, 88]]
    assert growth.seconds.tolist() == [4.0, 6.0]
