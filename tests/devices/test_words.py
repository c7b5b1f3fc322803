from __future__ import annotations

import pytest

from autobalance.devices.device import Device
from autobalance.devices.words import parse_devices


def test_count_and_size_in_words() -> None:
    assert [device.capacity for device in parse_devices("4x96MiB")] == [96 * 2**20] * 4


def test_kinds_are_mixed_in_the_given_order() -> None:
    assert [device.capacity for device in parse_devices("2x40GiB, 16GiB")] == [40 * 2**30, 40 * 2**30, 16 * 2**30]


def test_bytes_words_and_devices_may_stand_in_one_list() -> None:
    mine = Device("mine", 7)
    assert [device.capacity for device in parse_devices([5, "1KiB", mine, 10.9])] == [5, 1024, 7, 10]
    assert parse_devices([mine]) == (mine,)


def test_a_known_gpu_brings_its_rates() -> None:
    (device, other) = parse_devices("2xA100-80GB")
    assert device == other
    assert device.name == "A100-80GB"
    assert 75 * 2**30 < device.capacity < 80 * 2**30
    assert device.bandwidth == 2039e9
    assert not device.real


def test_devices_without_a_name_are_called_by_their_position() -> None:
    assert [device.name for device in parse_devices("2x1GiB")] == ["device 0", "device 1"]


def test_nodes_are_counted_and_keep_their_devices() -> None:
    devices = parse_devices("2 nodes x 8xH100")
    assert [device.node for device in devices] == [0] * 8 + [1] * 8
    assert {device.name for device in devices} == {"H100-80GB"}


def test_a_node_may_hold_several_kinds_and_nodes_may_differ() -> None:
    devices = parse_devices("2 nodes x (2xA100-80GB, 40GiB), 1 node x V100-16GB")
    assert [(device.node, device.name) for device in devices] == [
        (0, "A100-80GB"),
        (0, "A100-80GB"),
        (0, "device 2"),
        (1, "A100-80GB"),
        (1, "A100-80GB"),
        (1, "device 5"),
        (2, "V100-16GB"),
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("4xFoo", "'Foo' is neither a size nor a known GPU; .*A100-80GB"),
        ("", "has an empty part"),
        ("4x1GiB,,", "has an empty part"),
        ("4", "'4' has no unit; write '4x80GiB' for 4 devices, '4GiB' for a size of each"),
        ("0x1GiB", "asks for 0 devices"),
        ("99999x1GiB", "asks for 99999 devices"),
        ("0 nodes x 8xH100", "asks for 0 nodes"),
        ("100 nodes x 100x1GiB", "asks for 10000 devices; up to 4096 are planned for"),
        ("2 nodes x ", "has an empty part"),
        ("2 nodes x (4xA100", "opens 1 parentheses and closes 0"),
        (
            "2 nodes x 4xA100-80GB,4x40GiB",
            r"does not say on which node '4x40GiB' is: write '2 nodes x \(4xA100-80GB,4x40GiB\)'",
        ),
    ],
)
def test_words_that_mean_nothing_are_refused(words: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_devices(words)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="no device is given"):
        parse_devices([])


def test_a_single_device_or_another_thing_is_refused() -> None:
    with pytest.raises(TypeError, match="devices is a list"):
        parse_devices(Device("mine", 7))  # type: ignore[arg-type] # the wrong type is what is tested
    with pytest.raises(TypeError, match="devices is words such as"):
        parse_devices(4)  # type: ignore[arg-type] # the wrong type is what is tested
    with pytest.raises(TypeError, match="devices is words such as"):
        parse_devices(b"4x80GiB")
