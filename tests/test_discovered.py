"""Models that declare no blocks run on four devices by those found in them, and compute what they compute on one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autobalance


def double(inputs: int, outputs: int) -> nn.Sequential:
    parts = [(nn.Conv2d(width, outputs, 3, padding=1), nn.BatchNorm2d(outputs)) for width in (inputs, outputs)]
    return nn.Sequential(*parts[0], nn.ReLU(inplace=True), *parts[1], nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.middle = double(3, 4), double(4, 8)
        self.up, self.end = nn.ConvTranspose2d(8, 4, 2, 2), double(8, 4)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        skip = self.start(images)
        x = self.up(self.middle(F.max_pool2d(skip, 2)))
        return self.out(self.end(torch.cat([x, skip], 1)))


class TiedByFunction(nn.Module):
    """Uses the embedding's weight once more at the end, without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.linear(x, self.embed.weight)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.transformer(x, x))


class Shared(nn.Module):
    """Calls a part of its layers itself, too."""

    class Layer(nn.Module):
        def __init__(self, scale: nn.Module) -> None:
            super().__init__()
            self.scale, self.mix = scale, nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mix(self.scale(x)).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.first, self.middle, self.last = self.Layer(self.scale), nn.Linear(8, 8), self.Layer(nn.Linear(8, 8))
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.last(self.middle(self.first(self.embed(tokens))))
        return self.head(self.scale(x))


def features() -> nn.Sequential:
    convolutions = [part for width in (3, 8, 8) for part in (nn.Conv2d(width, 8, 3), nn.ReLU(inplace=True))]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (UNet, torch.randn(2, 3, 8, 8).double()),
        (features, torch.randn(2, 3, 12, 12).double()),
        (TiedByFunction, torch.arange(20).view(2, 10)),
        (Translator, torch.arange(20).view(2, 10)),
        (Shared, torch.arange(20).view(2, 10)),
    ],
    ids=["u-net", "sequential", "tied by function", "encoder and decoder", "shared part"],
)
def test_found_blocks_compute_what_one_device_computes(make: Callable[[], nn.Module], batch: Tensor) -> None:
    unsplit = make().double()  # so that another order of the same sums is not noticed
    split = copy.deepcopy(unsplit)
    unsplit(batch).square().sum().backward()
    with autobalance.simulate("4x4MiB"):
        plan = autobalance.plan(autobalance.profile(split, batch), "4x4MiB")
        assert len(set(plan.assignment)) > 2
        autobalance.dispatch(split, plan)
        split(batch.to(f"simulated:{plan.root}")).square().sum().backward()
        for (name, expected), parameter in zip(unsplit.named_parameters(), split.parameters(), strict=True):
            assert parameter.grad is not None, name
            assert expected.grad is not None, name
            torch.testing.assert_close(
                parameter.grad.cpu(), expected.grad, msg=lambda text, name=name: f"{name}: {text}"
            )
