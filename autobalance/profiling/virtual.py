"""Places of a trace: every block is somewhere else, so that each copy a split could need is seen once.

All of it happens on one simulated device; what differs is the account that a storage is charged to.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from autobalance.placement.copies import Copies
from autobalance.placement.locate import Place
from autobalance.placement.move import Mover
from autobalance.profiling.elements import copy_elements
from autobalance.profiling.tracer import Tracer
from autobalance.simulated.dispatch import charging
from autobalance.simulated.tensor import SimulatedTensor


class _Crossing(torch.autograd.Function):
    """A copy to another account, and of its gradient on the way back, as `.to(device)` would make."""

    @staticmethod
    def forward(ctx: Any, tensor: SimulatedTensor, locator: VirtualLocator, place: int) -> Tensor:
        ctx.locator, ctx.source = locator, tensor.account
        return locator.copy(tensor, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.locator.copy(gradients[0], ctx.source), None, None


class VirtualLocator:
    """Sends tensors between accounts and remembers who exchanged what.

    Args:
        tracer: is told which storages hold the same tensor.

    Attributes:
        exchanges: pairs of accounts, in the order in which tensors first went from one to the other.
        changed: pairs (account of an argument, block that changed it in place).
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._copies = Copies()
        self._parts: dict[int, tuple[TensorWeakRef, list[TensorWeakRef]]] = {}
        self.exchanges: dict[tuple[int, int], None] = {}
        self.changed: set[tuple[int, int]] = set()

    def place_of(self, tensor: Tensor) -> Place | None:
        """The account of a tensor on the simulated device."""
        return tensor.account if isinstance(tensor, SimulatedTensor) and tensor.index is not None else None

    def send(self, tensor: Tensor, place: Place) -> Tensor:
        """A copy charged to `place`."""
        assert isinstance(tensor, SimulatedTensor) and isinstance(place, int)
        self.exchanges.setdefault((tensor.account, place))
        return self._copies.get(tensor, place, lambda: self._cross(tensor, place))

    def _cross(self, tensor: SimulatedTensor, place: int) -> Tensor:
        if torch.is_grad_enabled() and tensor.requires_grad:
            crossed: Tensor = _Crossing.apply(tensor, self, place)
            return crossed
        return self.copy(tensor, place)

    def copy(self, tensor: SimulatedTensor, place: int) -> SimulatedTensor:
        """Copy without autograd, and tell the tracer which storages would be one on one device."""
        copied = copy_elements(tensor, place)
        source, target = tensor.elements.untyped_storage(), copied.elements.untyped_storage()
        if source.nbytes() == target.nbytes():
            self._tracer.copied(target, [source])
        else:  # a part of a storage: its copies are one on one device, but not one with the whole
            self._tracer.copied(target, self._other_copies(tensor, copied))
        return copied

    def _other_copies(self, tensor: Tensor, copied: Tensor) -> list[torch.UntypedStorage]:
        source, copies = self._parts.get(id(tensor), (None, []))
        if source is None or source() is not tensor:
            copies = []
            self._parts[id(tensor)] = (TensorWeakRef(tensor), copies)
        alive = [other for reference in copies if (other := reference()) is not None]
        copies.append(TensorWeakRef(copied))
        return [other.elements.untyped_storage() for other in alive if isinstance(other, SimulatedTensor)]

    def send_object(self, value: Any, place: Place) -> Any:
        """Move the tensors among the attributes, as the object's own `.to` would."""
        moved = copy.copy(value)
        mover = Mover(self, place)
        for name, item in getattr(value, "__dict__", {}).items():
            object.__setattr__(moved, name, mover.move(item))
        return moved

    def changed_in_place(self, tensor: Tensor, place: Place, block: str) -> None:
        """Remember that the block must sit with the one that made `tensor`."""
        assert isinstance(tensor, SimulatedTensor) and isinstance(place, int)
        self.changed.add((tensor.account, place))

    def enter(self, place: Place) -> Any:
        """Charge to a block what is made from nothing inside it."""
        assert isinstance(place, int)
        context = charging(place)
        context.__enter__()
        return context

    def leave(self, token: Any) -> None:
        """Charge to whom it was charged before."""
        token.__exit__(None, None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualLocator:
        return self
