"""Places of a trace: every block is somewhere else, so that each copy a split could need is seen once.

All of it happens on one device; what differs is the account that a storage is charged to.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from autobalance import compat
from autobalance.placement.copies import Copies
from autobalance.placement.locate import Place
from autobalance.placement.move import Mover
from autobalance.profiling.growing_fans import GrowingFan, WayBack
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.world import World


class Crossing(torch.autograd.Function):
    """A copy to another account, and of its gradient on the way back, as `.to(device)` would make."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, locator: VirtualLocator, place: int, alone: bool) -> Tensor:
        """Copy a tensor to `place`."""
        ctx.locator, ctx.source = locator, locator.place_of(tensor)
        copied = locator.copy(tensor, place, alone)
        ctx.way_back = None if alone else locator.fanned(tensor, copied)
        return copied

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Copy its gradient to where the tensor is."""
        copied = ctx.locator.cross(gradients[0], ctx.source)
        if ctx.way_back is not None:
            ctx.locator.returned(ctx.way_back, gradients[0], copied)
        return copied, None, None, None


def ways_back_from(node: Any) -> Iterator[WayBack]:
    """The ways that gradients take which an autograd node gives to copies.

    Args:
        node: of the graph.
    """
    for following, _ in node.next_functions:
        if is_crossing(following) and following.way_back is not None:
            yield following.way_back


def is_crossing(node: Any) -> bool:
    """Whether an autograd node copies a gradient back to another account.

    Args:
        node: such as a tensor's `grad_fn`.
    """
    return compat.is_node_of(node, Crossing)


class VirtualLocator:
    """Sends tensors between accounts and remembers who exchanged what.

    Args:
        tracer: is told which storages hold the same tensor.
        world: knows whose a tensor is, and makes copies.

    Attributes:
        exchanges: pairs of accounts, in the order in which tensors first went from one to the other.
        changed: pairs (account of an argument, block that changed it in place).
    """

    def __init__(self, tracer: Tracer, world: World) -> None:
        self._tracer = tracer
        self._world = world
        self._copies = Copies()
        self._parts: dict[int, tuple[TensorWeakRef, list[TensorWeakRef]]] = {}
        self._fans: dict[int, tuple[TensorWeakRef, int, GrowingFan]] = {}
        self.exchanges: dict[tuple[int, int], None] = {}
        self.changed: set[tuple[int, int]] = set()

    @property
    def nothing_moves(self) -> bool:
        """Every block is somewhere else."""
        return False

    def place_of(self, tensor: Tensor) -> Place | None:
        """The account of a tensor on the device."""
        return self._world.account_of(tensor)

    def send(self, tensor: Tensor, place: Place, alone: bool = False) -> Tensor:
        """A copy charged to `place`; the one that there is already, unless it is to be `alone`."""
        source = self._world.account_of(tensor)
        assert source is not None
        assert isinstance(place, int)
        self.exchanges.setdefault((source, place))
        if alone:
            return self.cross(tensor, place, alone)
        return self._copies.get(tensor, place, lambda: self.cross(tensor, place))

    def cross(self, tensor: Tensor, place: int, alone: bool = False) -> Tensor:
        """Copy, with the way back where there is a graph: that of a gradient too, which a second backward follows.

        Args:
            tensor: what is copied.
            place: for whom.
            alone: as for `copy`.
        """
        if torch.is_grad_enabled() and tensor.requires_grad:
            crossed: Tensor = Crossing.apply(tensor, self, place, alone)  # type: ignore[no-untyped-call]  # torch's own
            return crossed
        return self.copy(tensor, place, alone)

    def copy(self, tensor: Tensor, place: int, alone: bool = False) -> Tensor:
        """Copy without autograd, and tell the tracer which storages would be one on one device.

        Args:
            tensor: what is copied.
            place: for whom.
            alone: whether the copy is shared with nobody who is given the same tensor.
        """
        copied = self._world.copied(tensor, place)
        source, target = tensor.untyped_storage(), copied.untyped_storage()
        if self._tracer.calls is not None:
            self._tracer.calls.copied(source)
        if alone:
            self._tracer.copied(target, [], self._tracer.maker_of(source), source)
        elif source.nbytes() == target.nbytes():
            self._tracer.copied(target, [source], self._tracer.maker_of(source), source)
        else:  # a part of a storage: its copies are one on one device, and on that of the whole a view of it
            maker = f"copy {'x'.join(map(str, copied.shape))}"
            self._tracer.copied(target, self._other_copies(tensor, copied), maker, source)
        return copied

    def fanned(self, tensor: Tensor, copied: Tensor) -> WayBack:
        """Note that a copy's gradient will meet those of other copies of the same tensor.

        Args:
            tensor: what is copied.
            copied: the copy.
        """
        known = self._fans.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != compat.version(tensor):
            known = TensorWeakRef(tensor), compat.version(tensor), self._tracer.fans.begin()
            self._fans[id(tensor)] = known
        given = self._tracer.find(copied.untyped_storage())
        return self._tracer.fans.send(known[2], given, tuple(copied.shape))

    def returned(self, way: WayBack, gradient: Tensor, copied: Tensor) -> None:
        """Note that a copy's gradient has come back.

        Args:
            way: that it took.
            gradient: as the block made it.
            copied: its copy.
        """
        index = self._tracer.find(gradient.untyped_storage())
        if index is not None:
            way.leaves(index)
            self._tracer.fans.arrive(way, self._tracer.find(copied.untyped_storage()))

    def _other_copies(self, tensor: Tensor, copied: Tensor) -> list[torch.UntypedStorage]:
        source, copies = self._parts.get(id(tensor), (None, []))
        if source is None or source() is not tensor:
            copies = []
            self._parts[id(tensor)] = (TensorWeakRef(tensor), copies)
        alive = [other for reference in copies if (other := reference()) is not None]
        copies.append(TensorWeakRef(copied))
        return [other.untyped_storage() for other in alive]

    def send_object(self, value: Any, place: Place) -> Any:
        """Move the tensors among the attributes, as the object's own `.to` would."""
        moved = copy.copy(value)
        mover = Mover(_ByItself(self), place)
        for name, item in getattr(value, "__dict__", {}).items():
            object.__setattr__(moved, name, mover.move(item))
        return moved

    def changed_in_place(self, tensor: Tensor, place: Place, block: str) -> None:
        """Remember that the block must sit with the one that made `tensor`."""
        source = self._world.account_of(tensor)
        assert source is not None
        assert isinstance(place, int)
        self.changed.add((source, place))
        if self._tracer.calls is not None:
            self._tracer.calls.change_others(place)

    def enter(self, place: Place) -> Any:
        """Charge to a block what is made from nothing inside it."""
        assert isinstance(place, int)
        context = self._world.charging(place)
        context.__enter__()
        return context

    def leave(self, token: Any) -> None:
        """Charge to whom it was charged before."""
        token.__exit__(None, None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualLocator:
        return self


class _ByItself:
    """Sends what is in an object that moves by its own `.to`, which knows nothing of copies that others were given."""

    nothing_moves = False

    def __init__(self, locator: VirtualLocator) -> None:
        self._locator = locator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._locator, name)

    def send(self, tensor: Tensor, place: Place) -> Tensor:
        return self._locator.send(tensor, place, alone=True)
