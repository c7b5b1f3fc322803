"""What a model that fits one device would gain by DDP, which needs no split."""

from __future__ import annotations

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.rivals.alternatives import ring_bandwidth
from autobalance.partitioning.times import block_seconds, launch_seconds, optimizer_seconds

_WORTH_SAYING = 1.1


def faster_with_ddp(plan: Plan) -> str | None:
    """How many times as many samples DDP would train on in the same time, where each device can hold the whole model.

    Every device then takes a batch of its own, and gradients are summed over all while the backward runs (a ring moves
    `2 (N - 1) / N` of their bytes: Patarasu, Yuan, JPDC 2009).

    Example:
        >>> faster_with_ddp(plan)
        'The whole model fits one device, so strategy="ddp" would be about 3.8 x faster: ...'

    Args:
        plan: made in this process.

    Returns:
        None where the model does not fit one device, DDP is no faster, or that is not known.
    """
    profile = plan.profile
    if profile is None or not profile.training or len(plan.devices) < 2 or not plan.step_time or plan.accumulated:
        return None
    if profile.part_elements:  # what the whole batch takes is not in it
        return None
    if profile.peak() > min(plan.budgets):
        return None
    here = plan.step_time + max(optimizer_seconds(profile, plan.assignment, plan.devices))
    faster = len(plan.devices) * here / _step_of_one(plan)
    if faster < _WORTH_SAYING:
        return None
    return (
        f'The whole model fits one device, so strategy="ddp" would be about {faster:.1f} x faster: each of '
        f"{len(plan.devices)} devices would take a batch of its own."
    )


def _step_of_one(plan: Plan) -> float:
    """Seconds of a step of DDP on the device that takes longest."""
    profile, devices = plan.profile, plan.devices
    assert profile is not None
    gradients = sum(row.gradients or row.weights for row in profile.blocks)
    all_reduce = 2 * (len(devices) - 1) / len(devices) * gradients / ring_bandwidth(devices)
    seconds = 0.0
    for index, device in enumerate(devices):
        forward, backward = block_seconds(profile, device, devices)
        step = float(forward.sum()) + max(float(backward.sum()), all_reduce)
        step = max(step, launch_seconds(profile, devices))
        seconds = max(seconds, step + optimizer_seconds(profile, [index] * len(profile.blocks), devices)[index])
    return seconds
