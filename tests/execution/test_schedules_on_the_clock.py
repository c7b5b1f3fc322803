"""On the clock of simulated devices a step takes what its launch order takes on devices that never stall."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autobalance.blocks import find_blocks
from autobalance.devices.device import Device
from autobalance.execution.pipeline import Pipeline
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator
from autobalance.schedules.clock import Hold, run_clock
from autobalance.schedules.launches import launch_order
from autobalance.simulated import simulate

WIDTH, ROWS, BLOCKS = 16, 16, 8
FLOPS = 1e6
PRODUCT = 2 * ROWS * WIDTH**2 / FLOPS
"""Seconds of a block's forward; its backward has two products. Launches and copies are far quicker."""


class Chain(nn.Module):
    """Reads a number between its first two blocks if it is told to."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 1 and self.reads:
                float(x[0, 0])
            x = block(x)
        return x


def seconds_of_step(schedule: str, devices: Sequence[int], micro_batches: int, reads: bool = False) -> float:
    """Time of a step of a chain whose blocks are shared out equally over stages on these devices."""
    count = max(devices) + 1
    stage_of = [block * len(devices) // BLOCKS for block in range(BLOCKS)]
    with simulate([Device(f"device {index}", 2**30, flops=FLOPS, bandwidth=1e12) for index in range(count)]):
        places = [torch.device("simulated", index) for index in range(count)]
        model = Chain(reads)
        homes = [places[devices[stage]] for stage in stage_of]
        for block, home in zip(model.blocks, homes, strict=True):
            block.to(home)
        pipeline = Pipeline(schedule, stage_of, devices)
        install(model, find_blocks(model), homes, DeviceLocator(places), visitor=pipeline)
        x = torch.ones(ROWS, WIDTH, device=homes[0], requires_grad=True)
        losses: dict[int, Tensor] = {}

        def forward(number: int) -> None:
            losses[number] = model(x).sum()

        def backward(numbers: Sequence[int]) -> None:
            torch.stack([losses.pop(number) for number in numbers]).sum().backward()

        clock = torch.get_device_module("simulated")
        clock.reset_clock()
        pipeline.train(micro_batches, forward, backward)
        elapsed: float = clock.elapsed()
        return elapsed


CASES = pytest.mark.parametrize(
    ("schedule", "devices", "micro_batches"),
    [
        ("gpipe", (0, 1, 2, 3), 8),
        ("1f1b", (0, 1), 4),
        ("1f1b", (0, 1, 2, 3), 8),
        ("looped", (0, 1, 0, 1), 2),
        ("looped", (0, 1, 2, 3, 0, 1, 2, 3), 4),
    ],
)


@CASES
@pytest.mark.parametrize("reads", [False, True], ids=["never waits", "waits"])
def test_a_step_takes_the_time_of_its_launch_order(
    reads: bool, schedule: str, devices: tuple[int, ...], micro_batches: int
) -> None:
    stages = len(devices)
    forward = PRODUCT * BLOCKS / stages
    order = launch_order(schedule, stages, micro_batches, devices=devices)
    holds = [[Hold(0, PRODUCT)] if reads and stage == 0 else [] for stage in range(stages)]
    columns = [forward] * stages, [2 * forward] * stages, [0.0] * stages
    ideal = max(slot.stop for slot in run_clock(order, devices, *columns, holds))
    assert seconds_of_step(schedule, devices, micro_batches, reads) == pytest.approx(ideal, rel=0.02)
