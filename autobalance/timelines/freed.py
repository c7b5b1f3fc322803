"""What each block would let go of between forward and backward if it recomputed, or offloaded, what it saves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.timeline import Timeline
from autobalance.timelines.calls import Call
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
    deaths = timeline.lives[1]
    for call in timeline.calls:
        if call.start >= since:
            _add(freed, timeline, call, deaths, until)
    return freed


def _add(freed: Freed, timeline: Timeline, call: Call, deaths: NDArray[np.int64], end: int) -> None:
    sizes, block = timeline.sizes, call.block
    freed.known[block] = True
    alone = [storage for storage, until in zip(call.saved, call.until, strict=True) if until <= end]
    resting = [storage for storage in call.inputs if deaths[storage] > call.back]
    own = sum(sizes[storage] for storage in alone)
    if call.saved:
        brief = [storage for storage in call.inputs if deaths[storage] <= call.back]
        freed.recomputed[block] += own - sum(sizes[storage] for storage in (*brief, *call.kept))
    freed.offloaded[block] += own + sum(sizes[storage] for storage in resting)
    freed.pinned[block] += pinned_bytes([sizes[storage] for storage in (*alone, *resting)])
