from __future__ import annotations

import pytest

from autobalance.devices.device import Device


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="'mine' has a capacity of -1 bytes"):
        Device("mine", -1)
    with pytest.raises(ValueError, match="'mine' has link=0; rates must be above 0"):
        Device("mine", 1, link=0)


@pytest.mark.parametrize("capacity", ["8GiB", 8.5, True])
def test_a_capacity_is_a_whole_number_of_bytes(capacity: object) -> None:
    with pytest.raises(TypeError, match=r"'mine' has the capacity .*; it is a whole number of bytes"):
        Device("mine", capacity)  # type: ignore[arg-type] # the wrong type is what is tested
