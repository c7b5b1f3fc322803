from __future__ import annotations

from autobalance.report.names import block_ranges, device_label


def test_three_or_more_neighbours_are_a_range() -> None:
    names = list("abcdefg")
    assert block_ranges([0, 1, 2, 5], names) == "a … c, f"
    assert block_ranges([0, 1, 3, 4, 5, 6], names) == "a, b, d … g"
    assert block_ranges([], names) == ""
    assert block_ranges([0, 1, 2], ["model.layers.3", "model.layers.4", "model.layers.5"]) == "model.layers.3 … 5"


def test_a_device_without_a_name_of_its_own_is_a_number() -> None:
    assert device_label(1, "device 1") == "1"
    assert device_label(1, "device 0") == "1 device 0"
