"""Every test of this room runs on four simulated devices without a memory limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autobalance.simulated import simulate


@pytest.fixture(autouse=True)
def simulated_devices() -> Iterator[None]:
    """Four devices without a memory limit."""
    with simulate(4):
        yield
