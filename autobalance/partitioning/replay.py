"""What every device holds at its peak under any assignment, from the storage events of one trace."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.profiling.timeline import HOST, ROOT, Timeline


def replay(timeline: Timeline, device_of: Sequence[int], root: int, devices: int) -> list[int]:
    """Peak bytes of every device when block `b` lives on device `device_of[b]`.

    A copy at a block's door melts into its source where both are on one device: they hold one tensor.

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
    places = dict(enumerate(device_of))
    places[ROOT] = root
    places[HOST] = -1
    return timeline.peaks([places[owner] for owner in timeline.owners], devices)
