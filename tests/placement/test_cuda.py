from __future__ import annotations

import pytest
import torch
from models import CASES

import autobalance
from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan
from autobalance.profiling.profile import BlockCost

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def simulated_devices() -> None:
    """None: torch has one free slot, and these tests are for the GPU."""
    return


@pytest.mark.parametrize(
    "name", ["gpt", "batch norm convnet", "skip in glue", "lstm", "many arguments", "appends to a list"]
)
def test_four_stages_on_one_gpu_train_as_the_unsplit_model(name: str) -> None:
    case = CASES[name]
    names = case.body.block_names
    assignment = tuple(index * 4 // len(names) for index in range(len(names)))
    plan = Plan(
        assignment=assignment,
        blocks=tuple(BlockCost(block) for block in names),
        devices=tuple(Device(f"stage {index}", 2**30) for index in range(4)),
        budgets=(2**30,) * 4,
        peaks=(0,) * 4,
        root=assignment[-1],
        policy="balanced",
    )
    model, plain = autobalance.dispatch(case.make(), plan, devices=["cuda:0"] * 4), case.make().to("cuda:0")
    optimizers = [module.configure_optimizers() for module in (model, plain)]
    for inputs, targets in case.batches(5):
        batch = inputs.to("cuda:0"), targets.to("cuda:0")
        losses = []
        for module, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = module.training_step(batch, 0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert {str(parameter.device) for parameter in model.parameters()} == {"cuda:0"}
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
