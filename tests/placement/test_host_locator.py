"""Batches on the host reach a device as copies."""

from __future__ import annotations

from typing import Any

import torch

from autobalance.placement.host_locator import HostLocator
from autobalance.placement.move import Mover


def test_batch_on_the_host_is_copied_even_where_the_device_is_the_cpu() -> None:
    batch: dict[str, Any] = {"x": torch.ones(2), "n": 3}
    moved = Mover(HostLocator(), torch.device("cpu")).move(batch)
    assert moved["x"] is not batch["x"]
    assert torch.equal(moved["x"], batch["x"])
