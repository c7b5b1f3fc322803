from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.times import naive_step_time
from autobalance.profiling.profile import Profile

PROFILE = Profile.from_costs([1] * 3, forward_time=[1, 2, 3], backward_time=[2, 4, 6], transfer=[10, 20, 40])
DEVICES = [Device("fast", 1, link=10.0), Device("slow", 1, link=5.0)]


def test_on_one_device_only_the_blocks_take_time() -> None:
    assert naive_step_time(PROFILE, [0, 0, 0], 0, DEVICES) == 18


def test_a_cut_adds_its_bytes_over_the_slower_link_both_ways() -> None:
    assert naive_step_time(PROFILE, [0, 1, 1], 1, DEVICES) == pytest.approx(18 + 2 * 10 / 5)


def test_the_output_travels_to_a_root_elsewhere() -> None:
    assert naive_step_time(PROFILE, [1, 1, 1], 0, DEVICES) == pytest.approx(18 + 2 * 40 / 5)


def test_without_training_nothing_comes_back() -> None:
    assert naive_step_time(replace(PROFILE, training=False), [0, 1, 1], 1, DEVICES) == pytest.approx(18 + 10 / 5)
