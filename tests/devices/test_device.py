from __future__ import annotations

import pytest

from autobalance.devices.device import Device


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="'mine' has a capacity of -1 bytes"):
        Device("mine", -1)
    with pytest.raises(ValueError, match="'mine' has link=0; rates must be above 0"):
        Device("mine", 1, link=0)
