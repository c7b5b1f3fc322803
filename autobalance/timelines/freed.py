"""What each block would let go of between forward and backward if it recomputed, or offloaded, what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.timeline import Timeline
from autobalance.timelines.calls import Call
from autobalance.timelines.rests import rests_of
from autobalance.units import pinned_bytes


@dataclass(frozen=True)
class Freed:
    """Bytes of each block in one micro-batch.

    Attributes:
        known: whether it is known what its backward uses.
        recomputed: that it lets go of where it recomputes, less inputs that stay longer for that.
        offloaded: that it lets go of where it offloads.
        pinned: host memory that these take there.
    """

    known: NDArray[np.bool_]
    recomputed: NDArray[np.int64]
    offloaded: NDArray[np.int64]
    pinned: NDArray[np.int64]


def freed_bytes(timeline: Timeline, blocks: int) -> Freed:
    """What the blocks can let go of in the last step.

    Example:
        >>> freed_bytes(profile.timeline, len(profile.blocks)).recomputed

    Args:
        timeline: of one micro-batch.
        blocks: how many there are.
    """
    starts = [position for name, position in timeline.marks if name.endswith(" forward")]
    since = max(starts, default=0)
    ends = [position for name, position in timeline.marks if name.endswith(" backward") and position > since]
    # What others use in the backward rests as well, even if they are through before the block is.
    until = min(ends, default=len(timeline.events))
    freed = Freed(np.zeros(blocks, dtype=bool), *(np.zeros(blocks, dtype=np.int64) for _ in range(3)))
    calls: dict[int, list[Call]] = {}
    for call in timeline.calls:
        if call.start >= since:
            calls.setdefault(call.block, []).append(call)
    for block, its in calls.items():
        freed.known[block] = True
        freed.recomputed[block] = _recomputed(timeline, its, until)
        offloaded = [rest for rest in rests_of(timeline, its) if rest.gone <= until]
        freed.offloaded[block] = sum(timeline.sizes[rest.storage] for rest in offloaded)
        # Each call has its own on the host.
        freed.pinned[block] = pinned_bytes([timeline.sizes[rest.storage] for rest in offloaded for _ in rest.calls])
    return freed


def _recomputed(timeline: Timeline, calls: Sequence[Call], end: int) -> int:
    """What the calls of a block let go of, less what they were given and keep until they run again."""
    again = [call for call in calls if call.saved]
    saved = {storage: until for call in again for storage, until in zip(call.saved, call.until, strict=True)}
    given = {storage: call for call in reversed(again) for storage in call.inputs}  # the first comes back last
    alone = [storage for storage, until in saved.items() if until <= end and storage not in given]
    deaths, values = timeline.lives[1], timeline.values
    brief = [storage for storage, call in given.items() if storage not in saved and deaths[storage] <= call.back]
    # Copies of one tensor that stay are one.
    stay = list({values[storage] if values[storage] >= 0 else ~storage: storage for storage in brief}.values())
    stay = [*stay, *(storage for call in again for storage in call.kept)]
    return sum(timeline.sizes[storage] for storage in alone) - sum(timeline.sizes[storage] for storage in stay)
