from __future__ import annotations

import pytest

from autobalance.allocator.rounding import MIB, block_size, segment_size


@pytest.mark.parametrize(
    ("nbytes", "size"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_up_to_512_bytes(nbytes: int, size: int) -> None:
    assert block_size(nbytes) == size


def test_divisions_of_powers_of_two() -> None:
    # The example in CUDACachingAllocator.cpp: four divisions between 1024 and 2048 are 1024, 1280, 1536 and 1792.
    assert block_size(1200 * MIB, [4] * 16) == 1280 * MIB
    assert block_size(1024 * MIB, [4] * 16) == 1024 * MIB
    assert block_size(1800 * MIB, [4] * 16) == 2048 * MIB
    assert block_size(2000, [4] * 16) == 2048  # not above 4 x 512 B: as without divisions
    assert block_size(2049, [4] * 16) == 2560
    assert block_size(1200 * MIB, [1] * 16) == block_size(1200 * MIB, [0] * 16) == 1200 * MIB


def test_each_power_of_two_has_its_own_divisions_and_the_ends_stand_for_all_beyond() -> None:
    divisions = [2, *[0] * 14, 8]
    assert block_size(700 * 1024, divisions) == 768 * 1024  # below 1 MiB the first entry counts
    assert block_size(3 * MIB + 1, divisions) == 3 * MIB + 512
    assert block_size(100 * 2**30, divisions) == 104 * 2**30  # from 64 GiB on, the last one: steps of 8 GiB


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (31 * MIB, 32 * MIB),
    ],
)
def test_segments(size: int, segment: int) -> None:
    assert segment_size(size) == segment


def test_the_size_of_shared_segments_can_be_set() -> None:
    assert segment_size(3 * MIB, large_segment=64 * MIB) == 64 * MIB
    assert segment_size(512, large_segment=64 * MIB) == 2 * MIB
