"""Steps of Lightning's Trainer on the clock of simulated devices, for models whose blocks are easy to reckon with."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autobalance
from autobalance import Plan, SelfBalanceStrategy
from autobalance.devices.device import Device

WIDTH = 64
ROWS = 16
"""Of a micro-batch."""
WORDS = 100

# As slow as these small blocks are small, so that kernels take far longer than their launches, as on a GPU.
FLOPS = 1e8
BANDWIDTH, LINK = 1e12, 1e9


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.down(torch.relu(self.up(x)))
        return mixed


class Chain(pl.LightningModule):
    """Blocks between an embedding and a head that belong to none of them.

    Args:
        hidden: width inside each block.
    """

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(size) for size in hidden)
        self.head = nn.Linear(WIDTH, 1, bias=False)

    def self_balance(self) -> list[nn.Module]:
        return list(self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@dataclass(frozen=True)
class Way:
    """How a step runs.

    Attributes:
        schedule, micro_batches: as the strategy takes them.
        parts: micro-batches of a step, each of ROWS samples.
        accumulate: batches of a step; those of one sample each where it is more than one.
    """

    schedule: str
    parts: int
    micro_batches: int | str = 1
    accumulate: int = 1


@dataclass(frozen=True)
class Step:
    """The second step of a fit.

    Attributes:
        seconds: on the clock.
        held: bytes that each device holds at most, over what it held before.
        plan: of the run.
    """

    seconds: float
    held: tuple[int, ...]
    plan: Plan

    @property
    def moving(self) -> float:
        """Share of the step in which something is on a link, if nothing overlaps."""
        received = sum(stage.received for stage in self.plan.stages)
        return received * self.plan.micro_batches / LINK / self.seconds


class _Watch(pl.Callback):
    """Reads the clock from the first to the last batch of the second step.

    Args:
        batches: of a step.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._before: list[int] = []
        self.seconds = 0.0
        self.held: tuple[int, ...] = ()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batches:
            simulated = torch.get_device_module("simulated")
            self._before = [simulated.memory_allocated(index) for index in range(simulated.device_count())]
            for index in range(simulated.device_count()):
                simulated.reset_peak_memory_stats(index)
            simulated.reset_clock()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * self._batches - 1:
            simulated = torch.get_device_module("simulated")
            self.seconds = simulated.elapsed()
            self.held = tuple(
                simulated.max_memory_allocated(index) - before for index, before in enumerate(self._before)
            )


def clocked_fit(hidden: Sequence[int], devices: int, way: Way, rows: int = ROWS) -> Step:
    """The second step of a fit.

    Args:
        hidden: width inside each block.
        devices: how many.
        way: how it runs.
        rows: samples of a micro-batch; a batch of one sample stands for one micro-batch where batches accumulate.
    """
    warnings.simplefilter("ignore")
    for package in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.ERROR)
    torch.manual_seed(0)
    size = rows * way.parts // way.accumulate
    shape = (2 * way.accumulate, size) if way.accumulate > 1 else (2 * size,)
    words = TensorDataset(torch.randint(0, WORDS, shape))
    watch = _Watch(way.accumulate)
    boxes = [Device(f"device {index}", 2**30, flops=FLOPS, bandwidth=BANDWIDTH, link=LINK) for index in range(devices)]
    with autobalance.simulate(boxes):
        trainer = pl.Trainer(
            accelerator="simulated",
            devices=devices,
            strategy=SelfBalanceStrategy(schedule=way.schedule, micro_batches=way.micro_batches),
            accumulate_grad_batches=way.accumulate,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[watch],
        )
        batch = 1 if way.accumulate > 1 else size
        trainer.fit(Chain(hidden), DataLoader(words, batch_size=batch))
        plan: Plan = trainer.strategy.plan  # type: ignore[attr-defined]  # ours has one
    return Step(watch.seconds, watch.held, plan)
