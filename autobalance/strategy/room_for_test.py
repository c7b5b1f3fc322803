"""How many samples the test before the first batch may run at once, for it to take no more memory than is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from autobalance.execution.few_samples import slices
from autobalance.execution.pipeline import Pipeline
from autobalance.partitioning.plan import Plan

FEWEST = 2
"""Samples that a test takes: fewer are in no parts."""


def samples_at_once(pipeline: Pipeline, sizes: Sequence[int], trains: bool) -> int:
    """The samples that every stage holds together in a step, so that as many may pass through all stages as a whole.

    Example:
        >>> samples_at_once(Pipeline("1f1b", [0, 1], [0, 1]), sizes=[2, 2, 2], trains=True)
        2

    Args:
        pipeline: of the plan.
        sizes: samples of each micro-batch.
        trains: False for forwards alone.
    """
    return sum(sizes[: pipeline.least_in_flight(len(sizes), trains)])


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


def run_forward_of_two(module: Any, batch: Any, step: Callable[[Any], Any]) -> None:
    """Run a step's forward on two samples without a graph, for a trial to see what a test of it needs.

    Args:
        module: whose step it is.
        batch: of which the samples are.
        step: runs it; one that asks for gradients itself fails, as it does in the test.
    """
    with torch.no_grad(), suppress(RuntimeError):
        step(next(slices(module, batch, None, FEWEST)))
