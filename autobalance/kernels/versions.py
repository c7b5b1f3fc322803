"""Which release of torch runs: its kernels are the ones that are meant."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def release() -> tuple[int, int]:
    """Major and minor number of the torch that is installed."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)
