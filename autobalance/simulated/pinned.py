"""Host memory that was asked to be pinned: the clock lets copies to and from it run beside the host."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from autobalance import compat

_marked: dict[int, weakref.ref[Any]] = {}


def mark(tensor: torch.Tensor) -> None:
    """Take note that the memory of a host tensor was asked to be pinned.

    Args:
        tensor: on the host.
    """
    storage = tensor.untyped_storage()
    key = compat.storage_key(storage)
    _marked[key] = weakref.ref(storage, lambda _: _marked.pop(key, None))


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether the memory of a host tensor was asked to be pinned.

    Args:
        tensor: on the host.
    """
    return bool(_marked) and compat.storage_key(tensor.untyped_storage()) in _marked
