from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobalance


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def penalty(model: Any, x: Tensor) -> Tensor:
    """Of a critic: the norm of its gradient by the input."""
    x = x.detach().requires_grad_()
    loss: Tensor = model(x).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    total: Tensor = loss + (gradient.norm(dim=1) - 1).pow(2).mean()
    return total


def sharpness(model: Any, x: Tensor) -> Tensor:
    """The norm of the gradient by the weights."""
    loss: Tensor = model(x).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum()


@pytest.mark.parametrize("step", [penalty, sharpness])
def test_a_second_backward_goes_through_all_blocks(step: Callable[[Any, Tensor], Tensor]) -> None:
    profile = autobalance.profile(
        Net(), torch.randn(64, 64), optimizer=torch.optim.AdamW, step=step, target="simulated"
    )
    assert len(profile.blocks) == 3
    assert profile.peak() == counted(step)


def counted(step: Callable[[Any, Tensor], Tensor]) -> int:
    """Peak bytes of three real steps on one simulated device."""
    with autobalance.simulate(1):
        model = Net().to("simulated")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            x = torch.randn(64, 64).to("simulated")
            optimizer.zero_grad()
            loss = step(model, x)
            loss.backward()
            optimizer.step()
        return torch.get_device_module("simulated").max_memory_allocated()  # type: ignore[no-any-return]
