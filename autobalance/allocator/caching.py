"""CUDA's caching allocator: which block serves a request, and what has to be taken from the device for it.

c10/cuda/CUDACachingAllocator.cpp: `malloc`, `get_free_block`, `alloc_block`, `should_split`, `free_block`,
`release_available_cached_blocks`, `release_cached_blocks`, `garbage_collect_cached_blocks`. Left out: private pools of
CUDA graphs, and blocks that other streams still use when they are freed.
"""

from __future__ import annotations

import sys

from autobalance.allocator.expandable import give_pages_back, grow
from autobalance.allocator.pool import Block, Clock, DeviceMemory, Pool
from autobalance.allocator.rounding import GRANULE, MOST_SMALL, SMALL_SEGMENT, block_size, segment_size
from autobalance.allocator.settings import AllocatorSettings
from autobalance.units import format_size


class OutOfCapacity(Exception):
    """A request that the device cannot serve, even after all that is cached was given back.

    Attributes:
        wanted: bytes that were to be taken from the device.
        allocated: bytes in use.
        reserved: bytes taken from the device.
        capacity: bytes that can be taken.
    """

    def __init__(self, wanted: int, allocated: int, reserved: int, capacity: int) -> None:
        self.wanted, self.allocated, self.reserved, self.capacity = wanted, allocated, reserved, capacity
        super().__init__(
            f"{format_size(wanted)} more do not fit: of {format_size(capacity)}, {format_size(reserved)} are reserved "
            f"and {format_size(allocated)} in use"
        )


class CachingAllocator:
    """The allocator of one device.

    Example:
        >>> allocator = CachingAllocator(capacity=24 * 2**30)
        >>> block = allocator.allocate(3 * 2**20)
        >>> allocator.allocated, allocator.reserved
        (3145728, 20971520)

    Args:
        capacity: bytes that the process can take from the device, which is what is free once the CUDA context is there;
            None: without end.
        settings: as `PYTORCH_CUDA_ALLOC_CONF` gives them.

    Attributes:
        allocated: bytes of blocks in use, as `torch.cuda.memory_allocated` counts them.
        peak_allocated: most of them at once.
        retries: how often all cached memory was given back, as `num_alloc_retries` counts.
    """

    def __init__(self, capacity: int | None = None, settings: AllocatorSettings | None = None) -> None:
        self._settings = settings or AllocatorSettings()
        self._memory = DeviceMemory(capacity)
        fraction = self._settings.memory_fraction
        self._limit = int(capacity * fraction) if capacity is not None and fraction < 1 else None
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._clocks = {True: Clock(), False: Clock()}
        self._most_split = self._settings.max_split_size or sys.maxsize
        self._next_address = 0
        self.allocated = 0
        self.peak_allocated = 0
        self.retries = 0

    @property
    def reserved(self) -> int:
        """Bytes taken from the device, as `torch.cuda.memory_reserved` counts them."""
        return self._memory.reserved

    @property
    def peak_reserved(self) -> int:
        """Most bytes taken from the device at once."""
        return self._memory.peak

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """A block for a request.

        Args:
            nbytes: as requested.
            stream: blocks are reused on their own stream only.

        Raises:
            OutOfCapacity: the device cannot serve it.
        """
        size = block_size(nbytes, self._settings.roundup_power2_divisions)
        is_small = size <= MOST_SMALL
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = Pool(is_small, self._clocks[is_small])
        block = self._cached(pool, size) or self._taken(pool, size)
        rest = block.size - size
        if rest and self._splits(pool, size, rest):
            pool.add(pool.split(block, size))
        block.is_used = True
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Take a block back; it stays reserved.

        Args:
            block: what `malloc` returned.
        """
        self.allocated -= block.size
        block.is_used = False
        block.pool.merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give all cached memory back to the device that no block in use lies in, as `torch.cuda.empty_cache` does."""
        for pool in sorted(self._pools.values(), key=lambda pool: pool.is_small):
            if self._settings.expandable_segments:
                give_pages_back(pool, self._page(pool), self._memory)
                continue
            for _, _, block in [entry for entry in pool.free if entry[2].is_whole]:
                self._release(block)

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough and may serve so small a request."""
        pool.clock.now += 1
        free = pool.free
        found = pool.first_of(size)
        if found == len(free):
            return None
        if self._settings.expandable_segments:
            # A block counts as large as it could grow, so that the end of the segment is the last choice.
            while found + 1 < len(free) and _room(free[found + 1][2]) < _room(free[found][2]):
                found += 1
        most_split = self._most_split
        if size < most_split <= free[found][0]:
            return None
        if size >= most_split and free[found][0] >= size + self._settings.max_non_split_rounding:
            return None
        return free.pop(found)[2]

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.is_small or self._settings.expandable_segments:
            return rest >= GRANULE
        return size < self._most_split and rest > MOST_SMALL

    def _taken(self, pool: Pool, size: int) -> Block:
        """A block from the device, for which cached ones are given back where it has too little left."""
        segment = segment_size(size, self._settings.large_segment)
        if self._limit is not None and self._settings.garbage_collection_threshold:
            self._collect_garbage(self._limit)
        block = self._from_device(pool, size, segment)
        if block is None and self._give_large_back(pool, size):
            block = self._from_device(pool, size, segment)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._from_device(pool, size, segment)
        if block is None:
            most = self._memory.capacity if self._limit is None else self._limit
            assert most is not None, "without a capacity, the device has always more"
            raise OutOfCapacity(segment, self.allocated, self.reserved, most)
        return block

    def _from_device(self, pool: Pool, size: int, segment: int) -> Block | None:
        if self._limit is not None and self.reserved + segment > self._limit:
            return None
        if self._settings.expandable_segments:
            return grow(pool, size, self._page(pool), self._memory)
        if not self._memory.take(segment):
            return None
        block = Block(pool, segment, self._next_address)
        self._next_address += segment
        return block

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self._settings.large_segment

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._memory.give_back(block.size)

    def _give_large_back(self, pool: Pool, size: int) -> bool:
        """Give back just enough of the blocks that are too large to be split; False where there are not enough."""
        if self._settings.max_split_size is None or self._settings.expandable_segments:
            return False
        wanted = max(size, self._settings.max_split_size)
        found = pool.first_of(wanted)
        if found < len(pool.free):
            self._release(pool.free[found][2])
            return True
        released = 0
        while pool.free and released < wanted and pool.free[-1][0] >= self._settings.max_split_size:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _collect_garbage(self, limit: int) -> None:
        """Give back whole large segments that have long been free, once the threshold is passed."""
        threshold = int(self._settings.garbage_collection_threshold * limit)
        target = self.reserved - threshold
        if target <= 0 or self._settings.expandable_segments:
            return
        now = self._clocks[False].now
        pools = [pool for (is_small, _), pool in self._pools.items() if not is_small]
        whole = [block for pool in pools for _, _, block in pool.free if block.is_whole]
        reclaimed, some = 0, True
        while whole and some and reclaimed < target:
            average = sum(now - block.freed_at for block in whole) / len(whole)
            old = [block for block in whole if now - block.freed_at >= average]
            for block in old:
                reclaimed += block.size
                self._release(block)
            whole, some = [block for block in whole if block not in old], bool(old)


def _room(block: Block) -> int:
    """Bytes that a block of a growing segment could have without leaving its place."""
    following = block.next
    return block.size + (following.size if following is not None and not following.is_mapped else 0)
