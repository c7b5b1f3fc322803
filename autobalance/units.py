"""Sizes in words and back, `"10GiB"` is 10737418240 bytes, and times in words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Real
from typing import Any

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?i?B)?\s*", re.IGNORECASE)
_ROUNDED_UP = 0.9995  # with three figures this is 1, and not 1000 of the next smaller unit


def parse_size(size: str | float) -> int:
    """Bytes that a size in words, or a plain number of bytes, stands for.

    As in accelerate, `GB` is 10**9 bytes and `GiB` is 2**30. Fractions of a byte are cut off.

    Example:
        >>> parse_size("1.5 GiB")
        1610612736

    Args:
        size: a number of bytes, or a number with one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.

    Returns:
        The size in bytes.

    Raises:
        ValueError: the text is no size, or the number is negative, not finite, or less than one byte but not 0.
        TypeError: neither text nor a number.
    """
    number = _read(size) if isinstance(size, str) else _checked(size)
    if 0 < number < 1:
        raise ValueError(f"{size!r} is less than one byte; a size is a number of bytes or text such as '10GiB'")
    return int(number)


def _read(text: str) -> float:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as '10GiB', '512MiB' or '10GB'")
    return float(match[1]) * _UNITS[(match[2] or "").upper()]


def _checked(size: Any) -> Any:
    # NumPy's numbers are `Real`, too.
    if isinstance(size, bool) or not isinstance(size, Real):
        raise TypeError(f"a size is a number of bytes or text such as '10GiB', not {size!r}")
    if not math.isfinite(size) or size < 0:
        raise ValueError(f"a size in bytes is finite and not negative, not {size!r}")
    return size


def format_size(size: float) -> str:
    """Text for a number of bytes, in the largest binary unit that keeps it at one or more.

    Example:
        >>> format_size(1610612736)
        '1.50 GiB'

    Args:
        size: bytes; may be negative (a difference).

    Returns:
        The number with two decimals and its unit; whole bytes below 1 KiB.
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"


def format_time(seconds: float) -> str:
    """Text for a stretch of time, with three figures.

    Example:
        >>> format_time(0.01234), format_time(75)
        ('12.3 ms', '75.0 s')

    Args:
        seconds: 0 or more.
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= _ROUNDED_UP * scale:
            return f"{three_figures(seconds / scale)} {unit}"
    return f"{three_figures(seconds / 1e-6)} µs" if seconds else "0 s"


def three_figures(number: float) -> str:
    """A number with three figures, and all of those before the point.

    Example:
        >>> three_figures(1.2), three_figures(12345), three_figures(0.02804)
        ('1.20', '12,345', '0.028')

    Args:
        number: of any size.
    """
    if number < _ROUNDED_UP:
        return f"{number:.3g}"
    decimals = next((2 - place for place in (2, 1) if number >= _ROUNDED_UP * 10**place), 2)
    return f"{number:,.{decimals}f}"


def pinned_bytes(sizes: Sequence[int]) -> int:
    """Bytes of host memory that pinned buffers take: each is rounded up to a power of two.

    Example:
        >>> pinned_bytes([5, 8])
        16

    Args:
        sizes: bytes of each buffer.

    Source: `CachingHostAllocatorImpl::allocate` in torch's `ATen/core/CachingHostAllocator.h` takes the power of two
    above, up to `pinned_max_round_threshold_mb` of `PYTORCH_ALLOC_CONF`, which is unlimited by default.
    """
    return sum(1 << (int(size) - 1).bit_length() for size in sizes if size > 0)
