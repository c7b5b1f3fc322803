"""Sizes of one table or one axis in one unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_SCALES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def common_unit(sizes: Iterable[int]) -> tuple[str, Callable[[float], str]]:
    """The unit in which the largest size is at least one, and how a size is written in it.

    Example:
        >>> unit, size = common_unit([2**20, 2**30])
        >>> unit, size(2**20)
        ('GiB', '0.00')

    Args:
        sizes: bytes.
    """
    unit, scale = common_scale(sizes)
    return unit, (lambda size: f"{size / scale:,.2f}") if scale > 1 else (lambda size: f"{size:.0f}")


def common_scale(sizes: Iterable[int]) -> tuple[str, int]:
    """The unit in which the largest size is at least one, and its bytes.

    Example:
        >>> common_scale([5, 2**21])
        ('MiB', 1048576)

    Args:
        sizes: bytes.
    """
    largest = max(sizes, default=0)
    return next(((unit, scale) for unit, scale in _SCALES.items() if largest >= scale), ("bytes", 1))
