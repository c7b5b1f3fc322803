"""How many samples a batch has, and the same batch with another number of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from autobalance.placement.contents import tensors_in
from autobalance.placement.host_locator import HostLocator
from autobalance.placement.locate import Place
from autobalance.placement.move import Mover


def samples_in(data: Any) -> int:
    """The first dimension that all tensors of a batch have in common.

    Example:
        >>> samples_in((torch.zeros(8, 3), {"labels": torch.zeros(8)}))
        8

    Args:
        data: tensors in any nesting; numbers (tensors without dimensions) do not count.

    Raises:
        ValueError: there is no tensor, or their first dimensions differ.
    """
    sizes = sorted({tensor.shape[0] for tensor in tensors_in(data) if tensor.dim()})
    if not sizes or sizes == [0]:
        raise ValueError("the batch holds no tensor that could tell how many samples it has")
    if len(sizes) > 1:
        raise ValueError(
            f"tensors of the batch have different first dimensions ({', '.join(map(str, sizes))}), so how many samples "
            f"it has is not known"
        )
    return sizes[0]


def with_samples(data: Any, samples: int) -> Any:
    """The same batch with another number of samples: rows are left out at the end, or repeated from the start.

    Example:
        >>> with_samples(torch.arange(3), 5)
        tensor([0, 1, 2, 0, 1])

    Args:
        data: tensors in any nesting; not changed.
        samples: how many.

    Raises:
        ValueError: as for `samples_in`.
    """
    samples_in(data)
    return Mover(_Resizer(samples), samples).move(data)


class InPartsLocator(HostLocator):
    """Sends the attributes of an object with a `.to`, in a copy of it: its `.to` knows no place but devices.

    Example:
        >>> Mover(InPartsLocator(), "cuda:0").move(batch)
    """

    def send_object(self, value: Any, place: Place) -> Any:
        """A copy of the object whose attributes are sent."""
        moved = copy.copy(value)
        mover = Mover(self, place)
        for name, item in vars(value).items():
            object.__setattr__(moved, name, mover.move(item))
        return moved


class _Resizer(InPartsLocator):
    """Takes the number of samples as the place of a tensor, so that the walk over a batch is that of moving it."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples

    def place_of(self, tensor: Tensor) -> Place | None:
        return tensor.shape[0] if tensor.dim() else None

    def send(self, tensor: Tensor, place: Place) -> Tensor:
        rows = torch.arange(self._samples, device=tensor.device) % tensor.shape[0]
        return tensor.detach()[rows].requires_grad_(tensor.requires_grad)
