"""Where the graph of one module begins and ends when it runs alone, without a leaf or a loss of any bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Entry:
    """Where a graph begins that has no leaf on the device, since a leaf would stay alive; takes the gradient."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.tensor: Tensor | None = None

    def enter(self, tensor: Tensor) -> Tensor:
        """`tensor` itself, from now on part of a graph."""
        self.tensor = tensor
        with torch.enable_grad():
            anchor = torch.empty(0, requires_grad=True)
            entered: Tensor = _Enter.apply(anchor, self)  # type: ignore[no-untyped-call]  # torch's own
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: Entry) -> Any:
        ctx.entry = entry
        tensor, entry.tensor = entry.tensor, None
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (ctx.entry.gradient,) = gradients
        return None, None


class Exit(torch.autograd.Function):
    """A loss of no bytes whose gradients are ones, made when backward asks for them."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        """Give the loss."""
        ctx.made_like = [(output.shape, output.dtype, output.device) for output in outputs]
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Make a gradient of ones for each output."""
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.made_like)
