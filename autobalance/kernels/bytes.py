"""Bytes of buffers inside kernels, as the caching allocator counts them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

GRANULE = 512
FLOAT = 4
LONG = 8


def rounded(nbytes: int) -> int:
    """Bytes that the caching allocator counts for a buffer.

    Args:
        nbytes: that are asked for.
    """
    return -(-nbytes // GRANULE) * GRANULE


def buffer(shape: Iterable[int], itemsize: int) -> int:
    """Bytes of a buffer of that shape.

    Args:
        shape: lengths.
        itemsize: bytes of an element.
    """
    return rounded(math.prod(shape) * itemsize)


def up(number: int, multiple: int) -> int:
    """The next multiple, or the number itself if it is one.

    Args:
        number: not negative.
        multiple: of what.
    """
    return -(-number // multiple) * multiple


def copied(tensor: Tensor | None, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes of the copy that `tensor.contiguous()` makes; 0 where it makes none.

    Args:
        tensor: None needs no copy.
        memory_format: of the copy.
    """
    if tensor is None or tensor.is_contiguous(memory_format=memory_format):
        return 0
    return buffer(tensor.shape, tensor.itemsize)
