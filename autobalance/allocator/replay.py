"""What a device reserves, and whether it runs out, when the births and deaths on it are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autobalance.allocator.caching import CachingAllocator, OutOfCapacity
from autobalance.allocator.pool import Block
from autobalance.allocator.settings import AllocatorSettings

Requests = Sequence[tuple[int, int]]
"""(key, bytes): more than 0 bytes are born under the key, less than 0 die, 0: what is cached is given back."""


@dataclass(frozen=True)
class Replayed:
    """What a replay comes to.

    Example:
        >>> replay_requests([(0, 512), (1, 3 * 2**20), (0, -512)])
        Replayed(allocated=3146240, reserved=23068672, retries=0)

    Attributes:
        allocated: most bytes in use at once, as `torch.cuda.max_memory_allocated` counts them.
        reserved: most bytes taken from the device at once, as `torch.cuda.max_memory_reserved` counts them.
        retries: how often all cached memory had to be given back.
    """

    allocated: int
    reserved: int
    retries: int


def replay_requests(
    requests: Requests, capacity: int | None = None, settings: AllocatorSettings | None = None
) -> Replayed:
    """Let the caching allocator serve births and deaths in their order, on one stream.

    Example:
        >>> replay_requests([(0, 512), (0, -512)]).reserved
        2097152

    Args:
        requests: births and deaths; what never dies lives to the end.
        capacity: bytes that can be taken from the device; None: without end.
        settings: of the allocator.

    Raises:
        OutOfCapacity: a birth does not fit.
    """
    allocator = CachingAllocator(capacity, settings)
    held: dict[int, Block] = {}
    for key, nbytes in requests:
        if nbytes > 0:
            held[key] = allocator.allocate(nbytes)
        elif nbytes < 0:
            allocator.free(held.pop(key))
        else:
            allocator.empty_cache()
    return Replayed(allocator.peak_allocated, allocator.peak_reserved, allocator.retries)


def requests_fit(requests: Requests, capacity: int, settings: AllocatorSettings | None = None) -> bool:
    """Whether births and deaths can be served with so much memory.

    Less than the peak of reserved bytes can be enough, since cached memory is given back before the device runs out;
    more than the peak of bytes in use can be needed, since free memory may lie in pieces.

    Example:
        >>> requests_fit([(0, 512)], capacity=2**20)
        False

    Args:
        requests: births and deaths.
        capacity: bytes that can be taken from the device.
        settings: of the allocator.
    """
    try:
        replay_requests(requests, capacity, settings)
    except OutOfCapacity:
        return False
    return True
