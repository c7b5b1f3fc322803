"""Faults of simulated devices: an allocation that fails, and memory that another process takes during a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from autobalance.simulated import ledger


class Allocations:
    """Counts the allocations on simulated devices while `counting`, and fails some of them.

    Attributes:
        count: allocations so far.
        failed: those that have failed.
        on_failure: called in place of raising, with device and bytes; what it does may make the allocation fail.
    """

    def __init__(self) -> None:
        self.count = 0
        self.failed = 0
        self.fails: Callable[[int], bool] = lambda number: False
        self.on_failure: Callable[[int, int], None] | None = None
        self._inside = 0

    @contextmanager
    def counting(self) -> Any:
        """Count inside."""
        self._inside += 1  # a number: micro-batches enter and leave by turns
        try:
            yield
        finally:
            self._inside -= 1

    def meet(self, account: int, nbytes: int) -> None:
        """An allocation is about to be charged."""
        if not self._inside or nbytes <= 0:
            return
        self.count += 1
        if self.fails(self.count):
            self.failed += 1
            if self.on_failure is not None:
                self.on_failure(account, nbytes)
                return
            raise torch.OutOfMemoryError(
                f"simulated:{account} out of memory, as a CUDA device would be. Tried to allocate {nbytes} bytes."
            )


def watch_allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    """Have the devices' ledger tell of every allocation.

    Args:
        monkeypatch: undoes it.
    """
    allocations, charge = Allocations(), ledger.DeviceLedger.charge

    def watched(self: ledger.DeviceLedger, account: int, nbytes: int) -> None:
        if self is ledger.devices:
            allocations.meet(account, nbytes)
        charge(self, account, nbytes)

    monkeypatch.setattr(ledger.DeviceLedger, "charge", watched)
    return allocations


def shrink(device: int, capacity: int) -> None:
    """Let a simulated device have less memory from now on, as if another process had taken the rest.

    Args:
        device: its index.
        capacity: bytes that are left, those in use included.
    """
    ledger.devices.capacities = {**ledger.devices.capacities, device: capacity}
