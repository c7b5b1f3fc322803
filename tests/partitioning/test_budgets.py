from __future__ import annotations

import pytest

from autobalance.devices.device import Device
from autobalance.devices.words import parse_devices
from autobalance.partitioning.budgets import budgets_of

GIB = 2**30


def test_words_keep_nothing_back() -> None:
    assert budgets_of(parse_devices("2x10GiB")) == (10 * GIB, 10 * GIB)


def test_real_devices_keep_an_allowance_and_three_percent_back() -> None:
    devices = [Device("cuda:0", 100 * GIB, real=True), Device("cuda:1", 100, real=True)]
    assert budgets_of(devices) == (100 * GIB - 2**28 - int(3 * GIB), 0)


def test_max_memory_is_at_most_and_missing_keys_keep_the_capacity() -> None:
    devices = parse_devices("3x10GiB")
    assert budgets_of(devices, {0: "4GiB", 2: 99 * GIB}) == (4 * GIB, 10 * GIB, 10 * GIB)


@pytest.mark.parametrize(("reserve", "left"), [("1GiB", 9 * GIB), (2 * GIB, 8 * GIB), (0.25, 7.5 * GIB), (0, 10 * GIB)])
def test_reserve_in_bytes_words_or_as_a_share(reserve: str | float, left: float) -> None:
    assert budgets_of(parse_devices("1x10GiB"), reserve=reserve) == (left,)


@pytest.mark.parametrize("key", ["cpu", "disk"])
def test_offload_by_max_memory_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"max_memory has the key '{key}': nothing is offloaded"):
        budgets_of(parse_devices("2x10GiB"), {0: "1GiB", key: "64GiB"})


@pytest.mark.parametrize("key", [2, -1, "0", True])
def test_keys_are_positions(key: object) -> None:
    with pytest.raises(ValueError, match="keys are positions in the list of devices, here 0 to 1"):
        budgets_of(parse_devices("2x10GiB"), {key: "1GiB"})  # type: ignore[dict-item] # wrong keys are what is tested


def test_a_reserve_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keeps 20.00 GiB of device 0 \(device 0\), which has 10.00 GiB"):
        budgets_of(parse_devices("1x10GiB"), reserve="20GiB")


@pytest.mark.parametrize("limits", ["10GiB", [1, 2]])
def test_limits_without_positions_are_refused(limits: object) -> None:
    with pytest.raises(TypeError, match=r"max_memory is a mapping such as \{0: '10GiB'\}"):
        budgets_of(parse_devices("2x10GiB"), limits)  # type: ignore[arg-type] # the wrong type is what is tested
