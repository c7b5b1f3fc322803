"""A plan's device_map is what accelerate takes, for its own check and its own dispatch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autobalance
from autobalance import Plan

accelerate = pytest.importorskip("accelerate")
# It says so of its own maps, too, where a model has parameters beside its modules.
pytestmark = pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")


class Net(nn.Module):
    """Blocks of several modules, a loose parameter and a loose buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8))

    def self_balance(self) -> list[object]:
        return ["embed", *(f"layers.{index}" for index in range(3)), ["norm", "head"]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.fixture
def plan() -> Plan:
    profile = autobalance.profile(Net(), torch.zeros(2, 8), training=False, target="simulated")
    return autobalance.plan(profile, "2x1MiB", policy="balanced")


def test_accelerate_finds_every_tensor_in_the_map(plan: Plan) -> None:
    from accelerate.utils import check_device_map

    assert set(plan.device_map.values()) == {0, 1}
    check_device_map(Net(), plan.device_map)


@pytest.mark.parametrize("two_devices", [False, True])
def test_accelerate_dispatches_by_the_map(plan: Plan, two_devices: bool) -> None:
    model, x = Net(), torch.randn(2, 8)
    expected = model(x)
    # No GPU is there: the CPU stands for all devices, or for the first, beside weights that are kept on the host.
    names = {0: "cpu", 1: "disk"} if two_devices else {0: "cpu", 1: "cpu"}
    device_map = {name: names[place] for name, place in plan.device_map.items()}
    placed = accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir="offloaded", force_hooks=True)
    torch.testing.assert_close(placed(x), expected)
