"""How what is on the host, such as a batch, reaches a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autobalance import compat

_HOST = "host"


class HostLocator:
    """Moves tensors from the host, and from anywhere else, to a device; a device that is the host gets copies.

    Args:
        dtype: to which floating tensors are cast on the host; None: they stay as they are.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    @property
    def nothing_moves(self) -> bool:
        """Batches move."""
        return False

    def place_of(self, tensor: Tensor) -> Any:
        """The tensor's device; the host is no device of a trial, even where one of those is the CPU."""
        return tensor.device if tensor.device.type != "cpu" or compat.is_fake(tensor) else _HOST

    def send(self, tensor: Tensor, place: Any) -> Tensor:
        """A copy on the device."""
        return tensor.to(place, self._dtype if tensor.is_floating_point() else None, copy=True)

    def send_object(self, value: Any, place: Any) -> Any:
        """What the object's own `.to` returns."""
        return value.to(place)

    def changed_in_place(self, tensor: Tensor, place: Any, block: str) -> None:
        """Nobody keeps the host's tensor."""

    def enter(self, place: Any) -> Any:
        """Nothing is current."""

    def leave(self, token: Any) -> None:
        """Nothing was current."""
