"""Predicted time of a step."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.devices.device import Device
from autobalance.profiling.profile import Profile


def naive_step_time(profile: Profile, assignment: Sequence[int], root: int, devices: Sequence[Device]) -> float:
    """Seconds of one step in which one block runs at a time: all block times and all transfers.

    What leaves a block crosses to the next block in call order; in training its gradient comes back.

    Example:
        >>> naive_step_time(profile, plan.assignment, plan.root, plan.devices)

    Args:
        profile: what the blocks cost.
        assignment: device index per block.
        root: device index of the root, where the last block's output goes.
        devices: what they are; the slower of two links counts.
    """
    seconds = sum(block.forward_time + block.backward_time for block in profile.blocks)
    ways = 2 if profile.training else 1
    for block, here, there in zip(profile.blocks, assignment, [*assignment[1:], root], strict=True):
        if here != there:
            seconds += ways * block.outputs / min(devices[here].link, devices[there].link)
    return seconds
