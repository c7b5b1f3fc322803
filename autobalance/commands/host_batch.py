"""A batch on the host, for one that a factory made on meta with its model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autobalance.placement.locate import Place
from autobalance.placement.move import Mover
from autobalance.profiling.batches import InPartsLocator

_HERE = "host"


def batch_on_host(batch: Any) -> Any:
    """The same batch, with zeros on the host in place of tensors without values.

    Zeros are a valid index, label and pixel.

    Example:
        >>> batch_on_host({"x": torch.empty(2, device="meta")})
        {'x': tensor([0., 0.])}

    Args:
        batch: tensors in any nesting; tensors with values stay what they are.
    """
    return Mover(_FromMeta(), _HERE).move(batch)


class _FromMeta(InPartsLocator):
    """Takes meta for the only place that is not the host."""

    def place_of(self, tensor: Tensor) -> Place | None:
        return "meta" if tensor.device.type == "meta" else _HERE

    def send(self, tensor: Tensor, place: Place) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)
