"""Where a tensor is, and how it gets somewhere else.

Hooks and glue ask a `Locator`, so that one and the same code moves real tensors between devices in a run, and books
copies between blocks in a trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from autobalance.placement.copies import Copies
from autobalance.placement.couriers import send
from autobalance.placement.ready import ready_event

Place = Hashable
"""A device in a run, the index of a block in a trace."""


class Locator(Protocol):
    """Knows the places of tensors and sends tensors between places."""

    @property
    def nothing_moves(self) -> bool:
        """Whether every place is one and the same, so that doors and glue have nothing to do."""

    def place_of(self, tensor: Tensor) -> Place | None:
        """The place of `tensor`, or None if it is not to be moved (it is on the host, or all places are one).

        Args:
            tensor: any.
        """

    def send(self, tensor: Tensor, place: Place) -> Tensor:
        """A copy of `tensor` at `place`, part of the autograd graph.

        Args:
            tensor: any.
            place: where it is wanted.
        """

    def send_object(self, value: Any, place: Place) -> Any:
        """Move an object that has a `.to` method of its own.

        Args:
            value: with a `.to` of its own.
            place: where it is wanted.
        """

    def changed_in_place(self, tensor: Tensor, place: Place, block: str) -> None:
        """A block at `place` changed its copy of `tensor`, so that the change would be lost.

        Args:
            tensor: that was sent.
            place: where it was changed.
            block: name of the block that did it.
        """

    def enter(self, place: Place) -> Any:
        """Make `place` current and return what `leave` needs to undo it.

        Args:
            place: that is entered.
        """

    def leave(self, token: Any) -> None:
        """Undo `enter`.

        Args:
            token: what `enter` returned.
        """


class DeviceLocator:
    """Places are torch devices; several may be equal, and a tensor on none of them stays where it is.

    Example:
        >>> locator = DeviceLocator([torch.device("cuda", 0), torch.device("cuda", 1)])  # doctest: +SKIP

    Args:
        devices: of the placement.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = frozenset(map(with_index, devices))
        # Tensors on the host stay there, as they would with a single device; on CPU devices every tensor is at home.
        self._moving = frozenset(device for device in self._devices if device.type != "cpu")
        self._copies = Copies()

    @property
    def nothing_moves(self) -> bool:
        """Whether all devices are the CPU."""
        return not self._moving

    @property
    def devices(self) -> frozenset[torch.device]:
        """Every device of the placement."""
        return self._devices

    def place_of(self, tensor: Tensor) -> Place | None:
        """The device of `tensor` if it is one of the plan's, else None."""
        device = tensor.device
        return device if device in self._moving else None

    def send(self, tensor: Tensor, place: Place) -> Tensor:
        """`tensor.to(place)` beside what the devices compute, reusing a copy that somebody still holds."""
        assert isinstance(place, torch.device)
        return self._copies.get(tensor, place, lambda: send(tensor, place, ready_event(tensor)))

    def send_object(self, value: Any, place: Place) -> Any:
        """`value.to(place)`."""
        return value.to(place)

    def changed_in_place(self, tensor: Tensor, place: Place, block: str) -> None:
        """Refuse: on one device the caller would see the change, here only the copy has it.

        Args:
            tensor, place, block: as `Locator` has them.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"block {block!r} on {place} changed one of its arguments in place (shape {tuple(tensor.shape)}, "
            f"{tensor.dtype}), but that tensor lives on {tensor.device}: the change would be lost. Put {block!r} into "
            f"one block with the module that makes the tensor (a list inside the list that `self_balance()` returns), "
            f"or return the changed tensor instead."
        )

    def enter(self, place: Place) -> Any:
        """Make the device current: raw kernel launches and bare `device="cuda"` go there."""
        assert isinstance(place, torch.device)
        if place.type == "cpu":
            return None
        backend = torch.get_device_module(place)
        before = backend.current_device()
        if before == place.index:
            return None
        backend.set_device(place)
        return backend, before

    def leave(self, token: Any) -> None:
        """Make the device that was current before `enter` current again."""
        if token is not None:
            backend, before = token
            backend.set_device(before)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (tuple(self._devices),)


def with_index(device: torch.device) -> torch.device:
    """The device as a tensor on it reports it: `torch.device("cuda")` is the current GPU.

    Args:
        device: with an index or without.
    """
    has_index: bool = device.index is not None  # torch declares it an int
    if has_index or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())
