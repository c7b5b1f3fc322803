"""Blocks, the free ones among them in order of size, and the memory of the device that they are cut from."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass


class Block:
    """A stretch of a segment: in use, free, or, in a growing segment, not backed by memory (yet or any more).

    Attributes:
        size: bytes.
        address: of its first byte.
        previous, next: neighbours in the segment.
        pool: whose it is.
        is_used: whether somebody holds it.
        is_mapped: whether memory stands behind it.
        freed_at: what the pool's clock showed when the block was freed.
    """

    __slots__ = ("address", "freed_at", "is_mapped", "is_used", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, size: int, address: int, is_mapped: bool = True) -> None:
        self.pool = pool
        self.size = size
        self.address = address
        self.is_mapped = is_mapped
        self.is_used = False
        self.freed_at = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.previous is None and self.next is None


@dataclass
class DeviceMemory:
    """What the process has taken of the device.

    Attributes:
        capacity: bytes that can be taken; None: without end.
        reserved: bytes taken now.
        peak: most bytes taken at once.
    """

    capacity: int | None
    reserved: int = 0
    peak: int = 0

    def take(self, nbytes: int) -> bool:
        """Take bytes, as `cudaMalloc` does; False where that many are not left."""
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return True

    def give_back(self, nbytes: int) -> None:
        """Return bytes, as `cudaFree` does."""
        self.reserved -= nbytes


@dataclass
class Clock:
    """Counts searches for a free block, by which blocks are told how long they have been free.

    Attributes:
        now: searches so far.
    """

    now: int = 0


class Pool:
    """Free blocks of one stream, small or large.

    Attributes:
        is_small: for requests up to 1 MiB.
        clock: shared by the pools of all streams.
        free: (size, address, block), in this order.
        unmapped: (address, block), in this order, of the pool's growing segment.
    """

    def __init__(self, is_small: bool, clock: Clock) -> None:
        self.is_small = is_small
        self.clock = clock
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def first_of(self, size: int) -> int:
        """Position of the smallest free block of at least `size` bytes."""
        return bisect_left(self.free, (size,))

    def add(self, block: Block) -> None:
        """Keep a free block."""
        block.freed_at = self.clock.now
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Forget a free block."""
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        """Keep a stretch without memory."""
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Forget a stretch without memory."""
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merge(self, block: Block) -> None:
        """Join a block that nobody holds with the neighbours that nobody holds either, if all have memory or none."""
        for neighbour in (block.previous, block.next):
            if neighbour is None or neighbour.is_used or neighbour.is_mapped != block.is_mapped:
                continue
            (self.remove if neighbour.is_mapped else self.remove_unmapped)(neighbour)
            if neighbour is block.previous:
                block.address = neighbour.address
                block.previous = neighbour.previous
                if block.previous is not None:
                    block.previous.next = block
            else:
                block.next = neighbour.next
                if block.next is not None:
                    block.next.previous = block
            block.size += neighbour.size

    def split(self, block: Block, size: int, *, is_mapped: bool = True) -> Block:
        """Cut a block after `size` bytes; the rest, which is not yet in any list, is returned.

        Args:
            block: longer than that.
            size: bytes.
            is_mapped: whether there is memory behind it.
        """
        rest = Block(self, block.size - size, block.address + size, is_mapped)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next, block.size = rest, size
        return rest
