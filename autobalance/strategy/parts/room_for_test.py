"""How many samples the test before the first batch may run at once, for it to take no more memory than is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from autobalance.partitioning.plan import Plan

FEWEST = 2
"""Samples that a test takes: fewer are in no parts."""


def has_room_for_two(plan: Plan, devices: Sequence[torch.device]) -> bool:
    """Whether two samples at once fit into what is planned, after one has had its forward and backward.

    Whatever has reached the highest mark of a device, one sample takes no more than that is above what is there now.

    Args:
        plan: of the run.
        devices: the torch device of each device of the plan.
    """
    for device, peak in zip(devices, plan.peaks, strict=True):
        if device.type != "cpu":
            backend = torch.get_device_module(device)
            if 2 * backend.max_memory_allocated(device) - backend.memory_allocated(device) > peak:
                return False
    return True


def run_forward(step: Callable[[Any], Any], few: Any) -> None:
    """Run a step's forward on a few samples without a graph, for a trial to see what a test of it needs.

    Args:
        step: runs it; one that asks for gradients itself fails, as it does in the test.
        few: the samples.
    """
    with torch.no_grad(), suppress(RuntimeError):
        step(few)
