"""The most that a run has held on each device, without what was there before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autobalance.strategy.planning.replan import held_by_others


class ReachedPeaks:
    """Peaks since it was made, or since the last `start_again`; the counters of the devices begin anew then.

    Args:
        strategy: of the run, between two steps.
        batch: tensors of the batch that comes next.
    """

    def __init__(self, strategy: Any, batch: Iterable[Tensor] = ()) -> None:
        self.plan = strategy.plan
        self._devices: list[torch.device] = [device for device in strategy.parallel_devices if device.type != "cpu"]
        self._others = held_by_others(strategy.lightning_module.trainer, self._devices, batch)
        self.start_again()

    def start_again(self) -> None:
        """Forget what was reached."""
        for device in self._devices:
            _backend(device).reset_peak_memory_stats(device)

    def read(self) -> tuple[int, ...]:
        """Bytes that the run has held at most on each device; those of the host have no counters and are left out."""
        return tuple(
            max(0, _backend(device).max_memory_allocated(device) - others)
            for device, others in zip(self._devices, self._others, strict=True)
        )


def _backend(device: torch.device) -> Any:
    return torch.get_device_module(device)
