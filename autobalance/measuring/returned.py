"""What comes out of a module, without its numbers, and the storages of tensors that are not kept alive for it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autobalance.compat import storage_key


@dataclass(frozen=True)
class Shape:
    """A tensor that comes out of a module, without its numbers.

    Attributes:
        like: on meta, with sizes, strides, type and offset.
        differentiable: whether it is part of a graph.
        storage: number of its storage among those that come out.
        given: the input whose storage it shares; None: it is new.
        saved: whether the graph keeps it.
        on_host: whether it is on the host, though the module is on a device.
    """

    like: Tensor
    differentiable: bool
    storage: int
    given: int | None
    saved: bool = False
    on_host: bool = False


@dataclass(frozen=True)
class Returned:
    """What comes out of a module, without numbers.

    Attributes:
        template: the module's own containers, with tensors on meta.
        shapes: of those tensors, in order.
        storages: bytes of their storages.
    """

    template: Any = None
    shapes: tuple[Shape, ...] = ()
    storages: tuple[int, ...] = ()

    def keeping(self, saved: Sequence[bool]) -> Returned:
        """The same, with it said which tensors the graph keeps.

        Args:
            saved: for each tensor, whether the graph keeps it.
        """
        shapes = (replace(shape, saved=keep) for shape, keep in zip(self.shapes, saved, strict=True))
        return replace(self, shapes=tuple(shapes))

    def gradient_bytes(self, granule: int) -> int:
        """Bytes of the gradients of all that is differentiable.

        Args:
            granule: bytes to whose multiples the device's allocator rounds up.
        """
        sizes = (
            shape.like.numel() * shape.like.element_size()
            for shape in self.shapes
            if shape.differentiable and not shape.on_host
        )
        return sum(-(-size // granule) * granule for size in sizes)


class Storages:
    """Storages of tensors, which are not kept alive.

    Args:
        tensors: whose storages.
        granule: bytes to whose multiples the device's allocator rounds up.
        device: storages elsewhere take no bytes; None: all do.
    """

    def __init__(self, tensors: Sequence[Tensor], granule: int, device: torch.device | None = None) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._keys = [storage_key(storage) for storage in storages]
        self._sizes = [
            -(-storage.nbytes() // granule) * granule if device in (None, tensor.device) else 0
            for storage, tensor in zip(storages, tensors, strict=True)
        ]
        self._references = [weakref.ref(storage) for storage in storages]

    def alive(self) -> tuple[bool, ...]:
        """For each tensor, whether somebody still holds its storage."""
        return tuple(reference() is not None for reference in self._references)

    def nbytes(self, which: Sequence[bool] | None = None, without: Storages | None = None) -> int:
        """Bytes of the storages, each once: of those tensors that `which` says, and that are not in `without`.

        Args:
            which: for each tensor, whether it counts; None: all do.
            without: storages that do not count.
        """
        chosen = [True] * len(self._keys) if which is None else which
        sizes = {key: size for key, size, wanted in zip(self._keys, self._sizes, chosen, strict=True) if wanted}
        others = set() if without is None else set(without._keys)
        return sum(size for key, size in sizes.items() if key not in others)
