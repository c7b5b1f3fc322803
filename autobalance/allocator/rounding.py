"""How large a block, and how large a segment, CUDA's caching allocator takes for a request.

Constants and formulas: c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp (`round_size`,
`roundup_power2_next_division`, `get_allocation_size`).
"""

from __future__ import annotations

from collections.abc import Sequence

MIB = 2**20

GRANULE = 512
"""Bytes to whose multiples requests are rounded up (`kMinBlockSize`)."""
MOST_SMALL = MIB
"""Largest request of the small pool (`kSmallSize`)."""
SMALL_SEGMENT = 2 * MIB
"""Bytes of a segment of the small pool (`kSmallBuffer`)."""
SHARED_LARGE = 10 * MIB
"""Requests below this share a segment of the large pool (`kMinLargeAlloc`)."""
LARGE_SEGMENT = 20 * MIB
"""Bytes of such a shared segment, unless `large_segment_size_mb` says otherwise."""
SEGMENT_STEP = 2 * MIB
"""Larger requests get a segment of their own, rounded up to multiples of this (`kRoundLarge`)."""
INTERVALS = 16
"""Powers of two from 1 MiB on for each of which `roundup_power2_divisions` has an entry."""


def block_size(nbytes: int, divisions: Sequence[int] = ()) -> int:
    """Bytes of the block that serves a request.

    Example:
        >>> block_size(1300), block_size(1200 * 1024, [4] * 16)
        (1536, 1310720)

    Args:
        nbytes: as requested.
        divisions: for each power of two from 1 MiB on, into how many steps the way to the next one is divided; sizes
            are rounded up to such a step. 0 and 1: multiples of 512 B.
    """
    if nbytes < GRANULE:
        return GRANULE
    steps = divisions[min(max(nbytes.bit_length() - MIB.bit_length(), 0), len(divisions) - 1)] if divisions else 0
    if steps <= 1 or nbytes <= GRANULE * steps:
        return -(-nbytes // GRANULE) * GRANULE
    step = max(1, (1 << (nbytes.bit_length() - 1)) // steps)
    return -(-nbytes // step) * step


def segment_size(size: int, large_segment: int = LARGE_SEGMENT) -> int:
    """Bytes of the segment that is taken from the device when no free block serves a block of `size` bytes.

    Example:
        >>> [segment_size(size) // 2**20 for size in (512, 2 * 2**20, 15 * 2**20)]
        [2, 20, 16]

    Args:
        size: bytes of the block.
        large_segment: bytes of a segment that requests of 1 to 10 MiB share.
    """
    if size <= MOST_SMALL:
        return SMALL_SEGMENT
    if size < SHARED_LARGE:
        return large_segment
    return -(-size // SEGMENT_STEP) * SEGMENT_STEP
