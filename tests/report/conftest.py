from __future__ import annotations

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.stage import Stage
from autobalance.profiling.profile import BlockCost, Profile

GIB = 2**30


@pytest.fixture
def pipelined() -> Plan:
    """Four blocks in two stages, a batch of 4 in two micro-batches; a step takes 0.3 + 0.35 + 1 x 0.35 = 1.0 s."""
    names = ("embed", "layers[0]", "layers<1>", "head")
    blocks = tuple(
        BlockCost(name, "Layer", weights=GIB, gradients=GIB, optimizer=2 * GIB, inputs=GIB // 2, saved=2 * GIB)
        for name in names
    )
    profile = Profile.from_costs(
        [4 * GIB] * 4, [2 * GIB] * 4, [GIB] * 4, [0.1] * 4, [0.2] * 4, names=names, batch_size=4
    )
    return Plan(
        assignment=(0, 0, 1, 1),
        blocks=blocks,
        devices=(Device("A100", 17 * GIB), Device("A100", 17 * GIB)),
        budgets=(16 * GIB, 16 * GIB),
        peaks=(12 * GIB + GIB // 2, 10 * GIB + GIB // 4),
        root=1,
        policy="auto",
        step_time=1.0,
        stages=(Stage(0, 2, 0, 2, 0.1, 0.2), Stage(2, 4, 1, 1, 0.1, 0.2, 0.05, GIB)),
        objective="step time",
        value=1.0,
        bounds={"area": 0.9, "indivisible block": 0.9, "transfers": 0.95, "memory": 1.0},
        optimal=True,
        advice=("head alone takes 30% of the step: splitting it in two would gain up to 10%",),
        micro_batches=2,
        schedule="1f1b",
        batch="training batch of 4",
        notes=("loss.item() was replaced",),
        profile=profile,
    )
