"""Where the whole model fits one device, the user is told what DDP would gain."""

from __future__ import annotations

import re

import pytest

from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile
from autobalance.strategy.planning.data_parallel import faster_with_ddp

PROFILE = Profile.from_costs(static=[2**20] * 8, saved=[2**18] * 8, forward_time=[0.1] * 8, backward_time=[0.2] * 8)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_split_without_overlap_wastes_all_devices_but_one(devices: int) -> None:
    told = faster_with_ddp(plan(PROFILE, f"{devices}x1GiB", schedule="naive", policy="balanced"))
    assert told is not None
    assert told.startswith("The whole model fits one device")
    found = re.search(r"about ([\d.]+) x faster", told)
    assert found
    assert float(found.group(1)) == pytest.approx(devices, rel=0.1)


def test_nothing_is_said_of_a_model_that_fits_no_device() -> None:
    assert faster_with_ddp(plan(PROFILE, "4x4MiB", schedule="naive")) is None


def test_nothing_is_said_of_one_device() -> None:
    assert faster_with_ddp(plan(PROFILE, "1x1GiB")) is None
