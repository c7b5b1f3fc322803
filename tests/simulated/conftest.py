"""Every test of this room runs on four simulated devices without a memory limit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from autobalance.simulated import simulate


@pytest.fixture(autouse=True)
def simulated_devices() -> Iterator[None]:
    """Four devices without a memory limit."""
    with simulate(4):
        yield


@pytest.fixture
def allocated() -> Callable[..., int]:
    """A function that says how many bytes of a device the test itself holds."""
    gc.collect()
    before = [torch.simulated.memory_allocated(index) for index in range(4)]
    return lambda index=0: torch.simulated.memory_allocated(index) - before[index]
