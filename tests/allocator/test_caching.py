"""Expected figures are worked out by hand from the rules in c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from autobalance.allocator.caching import CachingAllocator, OutOfCapacity
from autobalance.allocator.pool import Block
from autobalance.allocator.settings import AllocatorSettings

MIB = 2**20


def test_small_requests_share_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(MIB // 2)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB + 512, 4 * MIB)


def test_small_and_large_blocks_never_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(15 * MIB))
    allocator.allocate(MIB)
    assert allocator.reserved == 16 * MIB + 2 * MIB


def test_requests_of_1_to_10_mib_share_a_segment_of_20_mib() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(5 * MIB)
    assert allocator.reserved == 20 * MIB


def test_a_large_block_is_split_only_where_more_than_1_mib_is_left() -> None:
    allocator = CachingAllocator()
    allocator.allocate(int(10.5 * MIB))  # a segment of 12 MiB, of which 1.5 MiB are cut off
    assert allocator.allocated == int(10.5 * MIB)
    allocator.allocate(int(21.5 * MIB))  # a segment of 22 MiB, all of it in use
    assert allocator.allocated == int(10.5 * MIB) + 22 * MIB
    allocator.allocate(int(1.5 * MIB))  # the rest of the first
    assert allocator.reserved == 34 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 12, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(11 * MIB).address == 40 * MIB  # that of 12 MiB, behind that of 40


def test_free_neighbours_become_one() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 20 * MIB


def test_memory_in_pieces_cannot_serve_a_large_request() -> None:
    allocator = CachingAllocator(capacity=24 * MIB)
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    with pytest.raises(OutOfCapacity, match=r"20.00 MiB more do not fit: of 24.00 MiB, 20.00 MiB are reserved and 10"):
        allocator.allocate(6 * MIB)


def test_blocks_are_reused_on_their_own_stream_only() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB, stream=0))
    allocator.allocate(12 * MIB, stream=1)
    assert allocator.reserved == 24 * MIB
    allocator.allocate(12 * MIB, stream=0)
    assert allocator.reserved == 24 * MIB


def test_whole_cached_segments_are_given_back_before_the_device_runs_out() -> None:
    allocator = CachingAllocator(capacity=40 * MIB)
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(MIB)
    allocator.allocate(30 * MIB)
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (32 * MIB, 32 * MIB, 1)


def test_a_segment_that_is_in_use_in_part_stays() -> None:
    allocator = CachingAllocator(capacity=40 * MIB)
    allocator.allocate(5 * MIB)
    allocator.free(allocator.allocate(10 * MIB))
    with pytest.raises(OutOfCapacity):
        allocator.allocate(22 * MIB)
    assert allocator.retries == 1
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 40 * MIB


class TestMaxSplitSize:
    settings = AllocatorSettings(max_split_size=32 * MIB)

    def test_larger_blocks_stay_whole_and_serve_no_small_request(self) -> None:
        allocator = CachingAllocator(settings=self.settings)
        allocator.free(allocator.allocate(40 * MIB))
        allocator.allocate(12 * MIB)
        assert allocator.reserved == 52 * MIB
        block = allocator.allocate(36 * MIB)
        assert (block.size, allocator.reserved) == (40 * MIB, 52 * MIB)

    def test_they_serve_no_request_that_wastes_20_mib(self) -> None:
        allocator = CachingAllocator(settings=self.settings)
        allocator.free(allocator.allocate(60 * MIB))
        allocator.allocate(40 * MIB)
        assert allocator.reserved == 100 * MIB

    def test_only_as_many_of_them_as_needed_are_given_back(self) -> None:
        allocator = CachingAllocator(capacity=200 * MIB, settings=self.settings)
        for block in [allocator.allocate(size * MIB) for size in (40, 60, 12, 70)]:
            allocator.free(block)
        # 100 MiB need both of the largest; 40 MiB and the small block stay, and nothing has to be tried again.
        allocator.allocate(100 * MIB)
        assert (allocator.reserved, allocator.retries) == (152 * MIB, 0)


def test_garbage_is_collected_from_the_threshold_on_oldest_first() -> None:
    settings = AllocatorSettings(garbage_collection_threshold=0.5, memory_fraction=0.9)
    allocator = CachingAllocator(capacity=200 * MIB, settings=settings)
    old, new = allocator.allocate(50 * MIB), allocator.allocate(30 * MIB)
    allocator.free(old)
    for _ in range(3):
        allocator.free(allocator.allocate(12 * MIB))  # served by a piece of the old block, so time passes
    allocator.free(new)
    allocator.allocate(60 * MIB)  # 80 of 180 MiB are reserved: below the threshold of 90
    assert allocator.reserved == 140 * MIB
    allocator.allocate(70 * MIB)  # 50 MiB above it: both free blocks go
    assert allocator.reserved == 130 * MIB


def test_the_threshold_does_nothing_without_a_limit() -> None:
    allocator = CachingAllocator(200 * MIB, AllocatorSettings(garbage_collection_threshold=0.1))
    allocator.free(allocator.allocate(50 * MIB))
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 110 * MIB


def test_a_share_of_the_device_is_a_limit() -> None:
    allocator = CachingAllocator(100 * MIB, AllocatorSettings(memory_fraction=0.5))
    with pytest.raises(OutOfCapacity, match=r"of 50.00 MiB"):
        allocator.allocate(60 * MIB)


class TestExpandableSegments:
    settings = AllocatorSettings(expandable_segments=True)

    def test_grow_by_pages_of_2_and_20_mib(self) -> None:
        allocator = CachingAllocator(settings=self.settings)
        allocator.allocate(512)
        assert allocator.reserved == 2 * MIB
        allocator.allocate(15 * MIB)
        assert allocator.reserved == 22 * MIB
        allocator.allocate(15 * MIB)  # 5 MiB are left, so one page more is enough
        assert allocator.reserved == 42 * MIB
        assert allocator.allocated == 30 * MIB + 512

    def test_leave_no_slivers(self) -> None:
        requests = [size * MIB for size in (21, 33, 27)]
        plain, growing = CachingAllocator(), CachingAllocator(settings=self.settings)
        for allocator in (plain, growing):
            for block in [allocator.allocate(nbytes) for nbytes in requests]:
                allocator.free(block)
            for nbytes in requests:
                allocator.allocate(nbytes + MIB * 2)
        assert growing.reserved == 100 * MIB  # 87 MiB in one segment
        assert plain.reserved == 120 * MIB  # 22, 34 and 28, none of which serves 35 MiB

    def test_whole_free_pages_are_given_back_before_the_device_runs_out(self) -> None:
        allocator = CachingAllocator(capacity=60 * MIB, settings=self.settings)
        _, second, _ = (allocator.allocate(20 * MIB) for _ in range(3))
        allocator.free(second)
        small = allocator.allocate(MIB)  # from the other pool: the page in the middle goes, and 2 MiB come
        assert (allocator.reserved, allocator.retries) == (42 * MIB, 1)
        with pytest.raises(OutOfCapacity):
            allocator.allocate(20 * MIB)
        allocator.free(small)
        again = allocator.allocate(20 * MIB)
        assert (again.address, allocator.reserved) == (20 * MIB, 60 * MIB)  # in the gap


def live_blocks_overlap(blocks: list[Block]) -> bool:
    spans = sorted((id(block.pool), block.address, block.address + block.size) for block in blocks)
    return any(pool == other and stop > start for (pool, _, stop), (other, start, _) in pairwise(spans))


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_in_use_never_overlap_and_all_memory_is_accounted_for(seed: int, expandable: bool) -> None:
    draw = random.Random(seed)
    capacity = 300 * MIB
    allocator = CachingAllocator(capacity, AllocatorSettings(expandable_segments=expandable))
    held: list[Block] = []
    wanted: dict[int, int] = {}
    for _ in range(400):
        if held and draw.random() < 0.48:
            allocator.free(held.pop(draw.randrange(len(held))))
        else:
            nbytes = draw.choice([1, 4000, 300_000, 2 * MIB, 7 * MIB, 12 * MIB, 40 * MIB])
            try:
                block = allocator.allocate(nbytes)
            except OutOfCapacity:
                continue
            held.append(block)
            wanted[id(block)] = nbytes
        assert not live_blocks_overlap(held)
        assert all(block.size >= wanted[id(block)] for block in held)
        assert sum(block.size for block in held) == allocator.allocated <= allocator.reserved <= capacity
    for block in held:
        allocator.free(block)
    allocator.allocate(280 * MIB)  # with nothing in use, all but the segments of other pools can be given back
    assert allocator.allocated == 280 * MIB
