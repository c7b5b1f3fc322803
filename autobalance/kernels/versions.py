"""Which release of torch is meant: the one that runs, unless somebody asks what another would do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_assumed: tuple[int, int] | None = None


def release() -> tuple[int, int]:
    """Major and minor number of the release whose tables are used."""
    return _assumed or _installed


def is_assumed() -> bool:
    """Whether the release whose tables are used is another than the one that runs."""
    return release() != _installed


@contextlib.contextmanager
def assuming(other: tuple[int, int]) -> Iterator[None]:
    """Use the tables of another release of torch inside.

    Example:
        >>> with assuming((2, 13)): ...

    Args:
        other: major and minor number.
    """
    global _assumed
    before, _assumed = _assumed, other
    try:
        yield
    finally:
        _assumed = before


def _parsed(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


_installed = _parsed(torch.__version__)
