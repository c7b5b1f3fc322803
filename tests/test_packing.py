from __future__ import annotations

import random

import pytest

from autobalance.packing import DIFFERENCES, PLAIN, pack, unpack


@pytest.mark.parametrize("numbers", [[], [0], [-1, 2**62, -(2**62)], list(range(1000)), [7] * 1000])
def test_numbers_come_back(numbers: list[int]) -> None:
    assert unpack(pack(numbers)) == tuple(numbers)


@pytest.mark.parametrize("seed", range(20))
def test_any_numbers_of_64_bits_come_back(seed: int) -> None:
    draw = random.Random(seed)
    numbers = [draw.randrange(-(2**63), 2**63) >> draw.randrange(63) for _ in range(draw.randrange(200))]
    assert unpack(pack(numbers)) == tuple(numbers)


def test_columns_that_repeat_or_rise_are_short() -> None:
    assert len(pack([512, 4096, 2**30] * 10_000)) < 1000
    assert len(pack(range(30_000))) < 1000
    assert pack(range(30_000)).startswith(DIFFERENCES)
    assert pack([5, 900, -3] * 100).startswith(f"{PLAIN}: ")


def test_more_than_64_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        pack([2**63])
