"""Segments that grow page by page, and give whole free pages back when memory runs out.

c10/cuda/CUDACachingAllocator.cpp: `find_expandable_block`, `try_allocate_expandable_block`, `map_block`, `unmap_block`.
A segment's addresses are reserved for more than the device has, so each pool needs one segment only.
"""

from __future__ import annotations

from autobalance.allocator.pool import Block, DeviceMemory, Pool

# More addresses than any device has bytes.
_ADDRESSES = 2**50


def grow(pool: Pool, size: int, page: int, memory: DeviceMemory) -> Block | None:
    """A free block of at least `size` bytes at the lowest address where free memory and new pages give one.

    Args:
        pool: whose segment grows.
        size: bytes.
        page: bytes by which memory is added.
        memory: where pages are taken from.

    Returns:
        The block, in no list any more; None where the device has no more pages. Pages that were added before that was
        known stay, as free blocks.
    """
    block = _place_for(pool, size)
    if not block.is_mapped and not _map(pool, block, min(block.size, size), page, memory):
        return None
    while block.size < size:
        following = block.next
        assert following is not None, "the place was chosen for its room"
        if not _map(pool, following, min(size - block.size, following.size), page, memory):
            return None
        block = following
    pool.remove(block)
    return block


def give_pages_back(pool: Pool, page: int, memory: DeviceMemory) -> None:
    """Return the whole pages inside the free blocks of a pool to the device.

    Args:
        pool: of which stream and size class.
        page: bytes of a page.
        memory: of the device.
    """
    for _, _, block in list(pool.free):
        first = -(-block.address // page) * page
        last = (block.address + block.size) // page * page
        if first >= last:
            continue
        pool.remove(block)
        inner = block
        if first > block.address:
            inner = pool.split(block, first - block.address)
            pool.add(block)
        if inner.size > last - first:
            pool.add(pool.split(inner, last - first))
        memory.give_back(inner.size)
        inner.is_mapped = False
        pool.merge(inner)
        pool.add_unmapped(inner)


def _place_for(pool: Pool, size: int) -> Block:
    """Where to grow: a stretch without memory, or the free block right before it, with room for `size` bytes."""
    for _, block in pool.unmapped:
        start = block
        if block.previous is not None and not block.previous.is_used:
            start = block.previous
        room, here = 0, start
        while room < size and here is not None and not here.is_used:
            room, here = room + here.size, here.next  # type: ignore[assignment]  # the last one has no next
        if room >= size:
            return start
    segment = Block(pool, _ADDRESSES, 0, is_mapped=False)
    pool.add_unmapped(segment)
    return segment


def _map(pool: Pool, block: Block, size: int, page: int, memory: DeviceMemory) -> bool:
    """Put pages behind the first `size` bytes of a stretch, which becomes one with the free blocks around it."""
    # A stretch without memory begins and ends at pages, and so do the pages that it is given.
    mapped = -(-size // page) * page
    if not memory.take(mapped):
        return False
    pool.remove_unmapped(block)
    block.is_mapped = True
    if mapped < block.size:
        pool.add_unmapped(pool.split(block, mapped, is_mapped=False))
    pool.merge(block)
    pool.add(block)
    return True
