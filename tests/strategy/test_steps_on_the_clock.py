"""The Trainer's steps take, on the clock of simulated devices, the textbook's time of their schedule."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autobalance
from autobalance.devices.device import Device

DEVICES, PARTS = 4, 8
WIDTH, ROWS = 16, 16
FLOPS = 1e6
PRODUCT = 2 * ROWS * WIDTH**2 / FLOPS
"""Seconds of a block's forward on a micro-batch; its backward has two products. Launches and copies are far quicker."""
TEXTBOOK = (PARTS + DEVICES - 1) * 3 * PRODUCT


def make_chain(lightning: ModuleType) -> Any:
    """A block for each device, between an embedding and a loss that belong to none of them."""

    class Chain(lightning.LightningModule):  # type: ignore[name-defined, misc] # one of two packages
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEVICES))

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = self.embed(batch[0])
            for layer in self.layers:
                x = layer(x)
            self.log("mean", x.mean(), on_step=True, on_epoch=True)
            loss: Tensor = x.square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Chain()


def make_watch(lightning: ModuleType, batches: int) -> Any:
    """Reads the clock over the batches of the second step."""

    class Watch(lightning.Callback):  # type: ignore[name-defined, misc] # one of two packages
        seconds = 0.0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == batches:
                torch.get_device_module("simulated").reset_clock()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 * batches - 1:
                self.seconds = torch.get_device_module("simulated").elapsed()

    return Watch()


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "accumulate", "seconds"),
    [
        ("naive", 1, 1, 3 * PRODUCT * PARTS * DEVICES),
        ("gpipe", PARTS, 1, TEXTBOOK),
        ("1f1b", PARTS, 1, TEXTBOOK),
        ("1f1b", "accumulate", PARTS, TEXTBOOK),
    ],
    ids=["naive", "gpipe", "1f1b", "accumulated"],
)
def test_a_step_takes_the_time_of_its_schedule(
    schedule: str,
    micro_batches: int | str,
    accumulate: int,
    seconds: float,
    lightning: ModuleType,
    trainer: Callable[..., Any],
) -> None:
    boxes = [Device(f"device {index}", 2**30, flops=FLOPS, bandwidth=1e12) for index in range(DEVICES)]
    watch = make_watch(lightning, accumulate)
    size = PARTS * ROWS // accumulate
    data = TensorDataset(torch.randint(0, 8, (2 * PARTS * ROWS,)))
    with autobalance.simulate(boxes):
        strategy = autobalance.SelfBalanceStrategy(schedule=schedule, micro_batches=micro_batches)
        run = trainer(strategy=strategy, accumulate_grad_batches=accumulate, callbacks=[watch])
        run.fit(make_chain(lightning), DataLoader(data, batch_size=size))
        assert schedule == "naive" or run.strategy.plan.assignment == tuple(range(DEVICES))
    assert watch.seconds == pytest.approx(seconds, rel=0.03)
