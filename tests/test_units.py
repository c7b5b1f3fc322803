from __future__ import annotations

import numpy as np
import pytest

from autobalance.units import format_size, format_time, parse_size


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (123, 123),
        ("123", 123),
        ("10GB", 10_000_000_000),
        ("10GiB", 10_737_418_240),
        ("96MiB", 100_663_296),
        ("1.5 GiB", 1_610_612_736),
        ("512 kib", 524_288),
        ("7B", 7),
        (".5GiB", 536_870_912),
        ("1.GiB", 1_073_741_824),
        (10.9, 10),
        (0.0, 0),
        (np.int64(7), 7),
    ],
)
def test_sizes_are_read_as_accelerate_reads_them(size: str | float, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("text", ["", "GiB", "10 XB", "-5GiB", "10GiB per device"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write a number and a unit, such as '10GiB'"):
        parse_size(text)


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf")])
def test_numbers_that_cannot_be_bytes_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        parse_size(number)


@pytest.mark.parametrize("size", [0.9, "0.05", "0.0001KiB"])
def test_a_share_is_not_taken_for_a_size(size: str | float) -> None:
    with pytest.raises(ValueError, match=f"{size!r} is less than one byte"):
        parse_size(size)


@pytest.mark.parametrize("thing", [None, True, [1]])
def test_other_types_are_refused(thing: object) -> None:
    with pytest.raises(TypeError, match="a size is a number of bytes or text"):
        parse_size(thing)  # type: ignore[arg-type] # the wrong type is what is tested


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**19, "1.50 MiB"),
        (2**30, "1.00 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_sizes_are_written_in_the_unit_that_fits(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (4e-6, "4.00 µs"),
        (0.0004, "400 µs"),
        (0.99951e-3, "1.00 ms"),
        (0.01234, "12.3 ms"),
        (0.9997, "1.00 s"),
        (9.997, "10.0 s"),
        (75.0, "75.0 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_times_have_three_figures(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
