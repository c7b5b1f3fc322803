"""Send parts that were made on the host to a trial's device, where those that are views share memory as in the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autobalance.compat import storage_key
from autobalance.placement.contents import tensors_in, untouchable
from autobalance.placement.move import Mover
from autobalance.profiling.batches import InPartsLocator


def sent(parts: Any, device: torch.device, whole: Any = None, moved: Any = None) -> Any:
    """Parts of a batch on a device: what shares memory on the host does so there.

    Example:
        >>> sent(batch.split(2), device, batch, batch.to(device))[1].untyped_storage().nbytes()

    Args:
        parts: on the host.
        device: of the trial.
        whole: the batch on the host; None: parts stand for themselves.
        moved: the same batch on the device.
    """
    return Mover(_SharingLocator(whole, moved), device).move(parts)


class _SharingLocator(InPartsLocator):
    """Sends each storage once; that of the whole batch is there already."""

    def __init__(self, whole: Any, moved: Any) -> None:
        super().__init__()
        pairs = zip(tensors_in(whole, in_objects=True), tensors_in(moved, in_objects=True), strict=False)
        self._there: dict[int, list[tuple[Tensor, Tensor]]] = {}  # several may be views of one storage, as of one text
        for here, there in pairs:
            if (here.shape, here.dtype, here.stride()) == (there.shape, there.dtype, there.stride()):
                self._there.setdefault(storage_key(here.untyped_storage()), []).append((here, there))

    def send(self, tensor: Tensor, place: Any) -> Tensor:
        if tensor.layout is not torch.strided:
            return super().send(tensor, place)
        known = self._there.setdefault(storage_key(tensor.untyped_storage()), [])
        if not known:
            items = tensor.untyped_storage().nbytes() // tensor.element_size()
            own = tensor.detach().as_strided((items,), (1,), 0)
            known.append((own, super().send(own, place)))
        held = next((pair for pair in known if _holds(pair[0], tensor)), None)
        if held is None:
            return super().send(tensor, place)
        base, there = held
        # As views that a batch is split into: a change of one is none of the others.
        offset = there.storage_offset() + tensor.storage_offset() - base.storage_offset()
        return there.data.as_strided(tensor.shape, tensor.stride(), offset).requires_grad_(tensor.requires_grad)

    def send_object(self, value: Any, place: Any) -> Any:
        """What the object's own `.to` moves, which may leave some of its tensors on the host, is sent."""
        made = untouchable(value).to(place)
        here, there = list(tensors_in(value, in_objects=True)), list(tensors_in(made, in_objects=True))
        if made is None or len(here) != len(there):
            return super().send_object(value, place)
        pairs = zip(here, there, strict=True)
        instead = {id(moved): self.send(tensor, place) for tensor, moved in pairs if moved.device != tensor.device}
        return Mover(_Instead(instead), place).move(made)


def _holds(base: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor lies between the first and the last element of another of its storage."""
    (first, last), (begin, end) = _ends(base), _ends(tensor)
    return base.dtype is tensor.dtype and first <= begin and end <= last


def _ends(tensor: Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    return first, first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


class _Instead(InPartsLocator):
    """Puts tensors in the place of others, which are known by their id."""

    def __init__(self, instead: dict[int, Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def place_of(self, tensor: Tensor) -> Any:
        return "elsewhere" if id(tensor) in self._instead else None

    def send(self, tensor: Tensor, place: Any) -> Tensor:
        return self._instead[id(tensor)]
