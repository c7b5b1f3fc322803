"""A plan is used only with a model that has its weights, on devices that have its memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autobalance
from autobalance import Plan
from autobalance.blocks import find_blocks
from autobalance.placement.agreement import memory_of, weights_held


class Net(nn.Module):
    """Two blocks that share a weight, and a loose scale."""

    def __init__(self, width: int = 200, inner: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.c = nn.Linear(width, inner)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.ones(width))

    def self_balance(self) -> list[str]:
        return ["a", "b", "c"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x) * self.scale))


def plan_for(model: nn.Module) -> Plan:
    profile = autobalance.profile(model, torch.zeros(2, 200), optimizer=torch.optim.SGD)
    return autobalance.plan(profile, "2x8MiB")


def test_a_profile_of_the_model_lies_between_the_bounds() -> None:
    model = Net()
    plan = plan_for(model)
    held = weights_held(model, find_blocks(model), plan)
    # The shared weight counts with one of its blocks; loose weights live with the block that uses them.
    assert held["a"][0] == 200 * 4
    assert held["b"] == (0, 200 * 200 * 4 + 256 + 1024 * (dict(plan.loose)["scale"] == 1))
    assert held["c"] == (4 * 200 * 4 + 16, 3584 + 512)
    for block in plan.blocks:
        assert held[block.name][0] <= block.weights <= held[block.name][1]


def test_another_model_with_the_same_names_is_refused_and_not_moved() -> None:
    plan = plan_for(Net())
    other = Net(inner=400)
    with autobalance.simulate("2x8MiB"):
        with pytest.raises(ValueError, match=r"made for another model: block 'c' has .* of weights there of float32"):
            autobalance.dispatch(other, plan)
        assert all(parameter.device.type == "cpu" for parameter in other.parameters())
        autobalance.dispatch(Net(), plan)


def test_a_model_of_another_type_than_planned_is_refused() -> None:
    plan = plan_for(Net())
    with pytest.raises(ValueError, match="or convert its parameters to the type that it was planned with"):
        autobalance.dispatch(Net().double(), plan, devices=["cpu", "cpu"])


def test_smaller_devices_are_refused_and_larger_ones_taken() -> None:
    plan = plan_for(Net())
    with (
        autobalance.simulate("2x96KiB"),
        pytest.raises(ValueError, match=r"made for other devices: it needs .* of sim"),
    ):
        autobalance.dispatch(Net(), plan)
    with autobalance.simulate("2x16MiB"):
        assert memory_of(torch.device("simulated", 1)) == 16 * 2**20
        autobalance.dispatch(Net(), plan)
    assert memory_of(torch.device("cpu")) is None
