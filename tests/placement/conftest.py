"""Every test of this room runs on four simulated devices without a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn

from autobalance.blocks import find_blocks
from autobalance.placement.install import Installed, install
from autobalance.placement.locate import DeviceLocator
from autobalance.placement.place import place
from autobalance.simulated import simulate

Split = Callable[..., Installed]


@pytest.fixture(autouse=True)
def simulated_devices() -> Iterator[None]:
    """Four devices without a memory limit."""
    with simulate(4):
        yield


@pytest.fixture
def locator() -> DeviceLocator:
    """Knows the four devices."""
    return DeviceLocator(torch.device("simulated", index) for index in range(4))


@pytest.fixture
def split(locator: DeviceLocator) -> Split:
    """`split(model, [0, 1, 1], root=1)` places the model's blocks, in the order it names them, and hooks them."""

    def split(
        model: nn.Module, assignment: Sequence[int], root: int = 0, methods: dict[str, list[str]] | None = None
    ) -> Installed:
        blocks = find_blocks(model)
        devices = [torch.device("simulated", index) for index in assignment]
        place(model, blocks, devices, {}, torch.device("simulated", root))
        return install(model, blocks, devices, locator, methods)

    return split
