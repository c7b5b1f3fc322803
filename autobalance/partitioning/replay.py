"""What every device holds at its peak under any assignment, from the storage events of one trace."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.allocator.replay import Replayed, replay_requests
from autobalance.allocator.settings import AllocatorSettings
from autobalance.profiling.timeline import Timeline
from autobalance.timelines.meeting import as_met


def replay(timeline: Timeline, device_of: Sequence[int], root: int, devices: int) -> list[int]:
    """Peak bytes of every device when block `b` lives on device `device_of[b]`.

    A copy at a block's door melts into its source where both are on one device: they hold one tensor. Gradients of one
    tensor meet where the blocks are that it went to, before they come back.

    Example:
        >>> replay(profile.timeline, device_of=[0, 0, 1], root=1, devices=2)

    Args:
        timeline: storage events.
        device_of: device index per block.
        root: device index of what the blocks do not own: batch, loss, metrics.
        devices: how many devices there are.

    Returns:
        Bytes per device.
    """
    met, homes = as_met(timeline, timeline.homes(device_of, root))
    return met.peaks(homes, devices)


def replay_allocator(
    timeline: Timeline,
    device_of: Sequence[int],
    root: int,
    devices: int,
    settings: AllocatorSettings | None = None,
) -> list[Replayed]:
    """What the caching allocator of every device has in use, and has reserved, at most.

    Example:
        >>> [device.reserved for device in replay_allocator(profile.timeline, [0, 0, 1], root=1, devices=2)]

    Args:
        timeline: storage events.
        device_of: device index per block.
        root: device index of what the blocks do not own.
        devices: how many devices there are.
        settings: of the allocators.
    """
    met, homes = as_met(timeline, timeline.homes(device_of, root))
    asked = met.requests(homes, devices)
    return [replay_requests(requests, settings=settings) for requests in asked]
