"""An optimizer that cannot step without numbers is measured by itself; its bytes are those of steps with numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.blocks import find_blocks
from autobalance.kernels.target import find_target
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch, PlainTrial


class EightBits(torch.optim.Optimizer):
    """State of one byte a number, made by looking at numbers, and a temporary of the parameter's size."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["sums"] = torch.zeros_like(parameter, dtype=torch.uint8)
                    state["scale"] = parameter.new_ones(1)
                largest = parameter.grad.abs().max()
                if bool(largest > 0):  # needs numbers
                    state["scale"].copy_(largest)
                parameter.sub_(parameter.grad * group["lr"])
        return loss


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).sum()


def with_numbers(target: str) -> Profile:
    made = model()
    trial = PlainTrial(EightBits, squares)
    profiler = Profiler(made, find_blocks(made), trial, [Batch("train batch", "train", torch.ones(4, 64))])
    profiler.target = find_target(target)
    profiler._kind = "real"
    return profiler.profile()


@pytest.mark.parametrize("target", ["simulated", "cpu"])
def test_state_and_peak_are_those_of_steps_with_numbers(target: str) -> None:
    found = autobalance.profile(model(), torch.ones(4, 64), optimizer=EightBits, step=squares, target=target)
    real = with_numbers(target)
    assert found.peak(phase="optimizer") == real.peak(phase="optimizer")
    assert found.peak() == real.peak()
    assert found.optimizers == ("EightBits",)
    assert [row.optimizer for row in found.blocks] == [row.optimizer for row in real.blocks]
    assert found.notes == (
        f"EightBits cannot step on tensors without numbers (DataDependentOutputException: "
        f"aten._local_scalar_dense.default): its bytes were measured on "
        f"{'cpu' if target == 'cpu' else 'simulated:0'} with parameters of each shape; the rest is traced",
    )


def test_optimizers_that_can_be_traced_are() -> None:
    assert autobalance.profile(model(), torch.ones(4, 64), optimizer=torch.optim.Adam, step=squares).notes == ()


class Broken(EightBits):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("this optimizer is broken")


def test_an_error_of_the_optimizers_own_is_the_one_that_is_raised() -> None:
    with pytest.raises(RuntimeError, match="this optimizer is broken"):
        autobalance.profile(model(), torch.ones(4, 64), optimizer=Broken, step=squares, target="simulated")
