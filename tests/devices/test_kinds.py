from __future__ import annotations

from dataclasses import replace

from autobalance.devices.device import Device
from autobalance.devices.kinds import kinds_of
from autobalance.devices.words import parse_devices


def test_devices_of_one_budget_and_speed_are_interchangeable() -> None:
    devices = parse_devices("2xA100-80GB,H100,A100-80GB")
    assert kinds_of(devices, [5, 5, 5, 5]) == ((0, 1, 3), (2,))
    assert kinds_of(devices, [5, 4, 5, 5]) == ((0, 3), (1,), (2,))


def test_equal_devices_of_two_nodes_are_not() -> None:
    assert kinds_of(parse_devices("2 nodes x 2xH100"), [5] * 4) == ((0, 1), (2, 3))


def test_a_bridge_between_two_sets_its_pair_apart() -> None:
    devices = [Device(f"cuda:{index}", 1) for index in range(4)]
    bridged = [replace(device, links=((f"cuda:{index ^ 1}", 1e11),)) for index, device in enumerate(devices)]
    assert kinds_of(devices, [5] * 4) == ((0, 1, 2, 3),)
    assert kinds_of(bridged, [5] * 4) == ((0, 1), (2, 3))
