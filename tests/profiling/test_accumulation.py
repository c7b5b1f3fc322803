"""Gradients that meet are added in place where autograd does so, as `torch.profiler` sees it on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autobalance
from tests.benchmarks.cpu_truth import count

ROWS, WIDTH = 64, 2048
BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "the gradient of one branch is held by nothing else": lambda h: h.neg().add_(h),
    "both are one tensor": lambda h: h.clone().add_(h),
    "a part of a larger gradient comes first": lambda h: torch.cat([h.neg(), h], dim=1)[:, WIDTH // 2 :][:, :WIDTH],
    "three meet": lambda h: h.neg().add_(h).add_(h.neg()),
}


class Branching(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.first = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return BRANCHES[self.name](self.first(x))


def build(name: str) -> nn.Module:
    return nn.Sequential(Branching(name), nn.Linear(WIDTH, 8))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


@pytest.mark.parametrize("name", BRANCHES)
def test_the_peak_is_that_of_the_cpus_own_allocator(name: str) -> None:
    source = torch.randn(ROWS, 8)

    def train(mark: Callable[[str], None]) -> None:
        model = build(name)
        batch = source.clone()
        mark("step 1 forward")
        value = loss(model, batch)
        mark("step 1 backward")
        value.backward()

    profile = autobalance.profile(build(name), source, step=loss, target="cpu")
    assert profile.peak(1) == count(train).peak(1, "forward+backward")


def test_simulated_devices_add_them_to_a_tensor_of_their_own() -> None:
    name = "the gradient of one branch is held by nothing else"
    there, here = (
        autobalance.profile(build(name), torch.randn(ROWS, 8), step=loss, target=target).peak()
        for target in ("simulated", "cpu")
    )
    assert there - here == pytest.approx(ROWS * WIDTH * 4, abs=512)  # simulated devices round up
