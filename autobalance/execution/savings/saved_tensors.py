"""What one call of a block saves for its backward, where some of that rests elsewhere until then.

By whole storages, each once: several saved tensors are often views of one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from autobalance.compat import base_of, parts_of, storage_key, version
from autobalance.execution.savings.host_copies import Arrival
from autobalance.placement.hooks import Door, inside


class Rest(Protocol):
    """A storage that rests elsewhere.

    Attributes:
        witness: a tensor that counts changes in place together with those that were saved.
        version: changes that it had counted when it was saved.
        where: in words, for errors.
    """

    witness: Tensor
    version: int
    where: str

    def arrive(self) -> Arrival:
        """Its elements in a row, on the device."""

    def is_of(self, storage: torch.UntypedStorage, number: int) -> bool:
        """Whether it holds what a storage does after so many changes.

        Args:
            storage: on the device.
            number: changes in place that a tensor of it has counted.
        """


class Part:
    """A saved tensor: a view of a storage that rests elsewhere.

    Args:
        rest: of the storage.
        tensor: as it was saved.
        number: how many were saved before it in the call.
    """

    def __init__(self, rest: Rest, tensor: Tensor, number: int) -> None:
        self.rest = rest
        self.number = number
        self.arrival: Arrival | None = None
        self._dtype = tensor.dtype
        self._layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def of(self, elements: Tensor) -> Tensor:
        """The tensor, as a view of the elements of its storage.

        Args:
            elements: those of the storage, in a row.
        """
        size, stride, offset = self._layout
        elements = elements if elements.dtype == self._dtype else elements.view(self._dtype)
        return elements.as_strided(size, stride, offset)

    def check(self) -> None:
        """Refuse, as torch does, to go back with other numbers than the forward went on with.

        Raises:
            RuntimeError: naming what was changed.
        """
        now = version(self.rest.witness)
        if now != self.rest.version:
            size, _, _ = self._layout
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._dtype} {list(size)}], {self.rest.where}, is at version {now}; expected version "
                f"{self.rest.version} instead. Change a copy, or change it before the forward or after the backward."
            )


class SavedTensors:
    """Packs and unpacks what a call saves; several calls may be under way, of several micro-batches, say.

    Example:
        >>> saved = SavedTensors(door, device, rest_of=Offloaded)                     # doctest: +SKIP
        >>> with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):  # doctest: +SKIP
        ...     output = block(x)
        >>> saved.end_forward()                                                       # doctest: +SKIP

    Args:
        door: of the block.
        device: where it is.
        stays: keys of storages that stay where they are.
        known: what rests elsewhere anyway, by the key of the storage that is on the device during the forward.
        rest_of: sends the storage of a tensor away; None: it stays, if it is not known.
        begin_backward: called when the backward asks for something.
    """

    def __init__(
        self,
        door: Door,
        device: torch.device,
        stays: frozenset[int] = frozenset(),
        known: Mapping[int, Rest] | None = None,
        rest_of: Callable[[Tensor], Rest] | None = None,
        begin_backward: Callable[[], None] | None = None,
    ) -> None:
        self._door = door
        self._device = device
        self._stays = stays
        self._known = dict(known or {})
        self._rest_of = rest_of
        self._begin_backward = begin_backward
        self._rests: dict[int, Rest] = {}
        # Autograd drops a part when nothing will ask for it any more.
        self._parts: weakref.WeakSet[Part] = weakref.WeakSet()
        self._count = 0

    def pack(self, tensor: Tensor) -> Part | Tensor:
        """What autograd keeps in place of a tensor that it saves.

        Args:
            tensor: that is saved.
        """
        rest = self._known_rest(tensor)
        if rest is None and (self._rest_of is None or not self._may_go(tensor)):
            return tensor.detach()  # itself, it would hold the node that holds it
        with torch.no_grad(), inside(self._door):
            part = Part(rest or self._sent_away(tensor), tensor, self._count)
        self._count += 1
        self._parts.add(part)
        return part

    def end_forward(self) -> None:
        """Leave it to autograd how long what was saved is kept."""
        self._rests.clear()
        self._known.clear()

    def unpack(self, packed: Part | Tensor) -> Tensor:
        """The tensor again, for the backward.

        Args:
            packed: what `pack` returned.
        """
        if not isinstance(packed, Part):
            return packed
        packed.check()
        with torch.no_grad(), inside(self._door):
            if packed.arrival is None:
                self._bring_back(packed)
            arrival, packed.arrival = packed.arrival, None
            assert arrival is not None
            return packed.of(arrival.wait())

    def _known_rest(self, tensor: Tensor) -> Rest | None:
        return self._known.get(storage_key(tensor.untyped_storage())) if tensor.layout is torch.strided else None

    def _may_go(self, tensor: Tensor) -> bool:
        if tensor.device != self._device or tensor.layout is not torch.strided or not tensor.untyped_storage().nbytes():
            return False
        if tensor.is_conj() or tensor.is_neg() or parts_of(tensor):  # more than a view of a storage
            return False
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)
        return not is_weight and storage_key(tensor.untyped_storage()) not in self._stays

    def _sent_away(self, tensor: Tensor) -> Rest:
        assert self._rest_of is not None
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        known = self._rests.get(key)
        # A storage that has died leaves its key to another.
        if known is None or not known.is_of(storage, version(tensor)):
            known = self._rests[key] = self._rest_of(tensor)
        return known

    def _bring_back(self, first: Part) -> None:
        """Send for everything that the backward may ask for, what was saved last first."""
        arrivals: dict[int, Arrival] = {}
        waiting = [part for part in self._parts if part.arrival is None]
        for part in sorted(waiting, key=lambda part: (part is not first, -part.number)):
            if id(part.rest) not in arrivals:
                arrivals[id(part.rest)] = part.rest.arrive()
            part.arrival = arrivals[id(part.rest)]
        if self._begin_backward is not None:
            self._begin_backward()
