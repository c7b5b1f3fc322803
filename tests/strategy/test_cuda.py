"""Steps in parts under the Trainer, on one GPU and on two; the same on simulated devices."""

from __future__ import annotations

import csv
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autobalance
from autobalance.simulated import backend

SIDE, BLOCKS, SAMPLES, STEPS = 256, 8, 8, 4
TWO_GPUS = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
PLACES = [
    pytest.param("cuda", 1, marks=pytest.mark.cuda),
    pytest.param("cuda", 2, marks=TWO_GPUS),
    ("simulated", 1),
    ("simulated", 2),
]


@pytest.fixture(autouse=True)
def devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two simulated ones, but for tests of GPUs: once torch knows them, autograd minds no streams of CUDA."""
    gc.collect()
    if request.node.get_closest_marker("cuda"):
        if backend.is_registered():
            pytest.skip("devices are simulated in this process: run `pytest -m cuda` by itself")
        yield
        return
    with autobalance.simulate(2):
        yield


class Scaled(nn.Module):
    """Works element by element, so that no library keeps a workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, SIDE * SIDE).reshape(SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


def make_module(lightning: ModuleType) -> Any:
    class Chain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaled() for _ in range(BLOCKS))
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for block in self.blocks:
                batch = block(batch)
            return batch.square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=10.0, momentum=0.9)

        def train_dataloader(self) -> DataLoader[Any]:
            generator = torch.Generator().manual_seed(3)
            return DataLoader(torch.randn(SAMPLES * STEPS, SIDE, SIDE, generator=generator), batch_size=SAMPLES)

    return Chain()


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize(("kind", "count"), PLACES)
def test_losses_are_those_of_plain_lightning_and_peaks_those_of_the_plan(
    kind: str, count: int, schedule: str, lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    plain, split = make_module(lightning), make_module(lightning)
    trainer(accelerator="gpu" if kind == "cuda" else "cpu", devices=1, strategy="auto").fit(plain)
    strategy = autobalance.SelfBalanceStrategy(
        schedule=schedule,
        micro_batches=1 if schedule == "naive" else 4,
        pin={f"blocks.{index}": index * count // BLOCKS for index in range(BLOCKS)},
        recompute=False,
    )
    places = [torch.device(kind, index) for index in range(count)]
    used = torch.get_device_module(kind)

    class Peaks(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            for place in places if index == STEPS - 1 else ():
                used.synchronize(place)
                used.reset_peak_memory_stats(place)

    accelerator = "gpu" if kind == "cuda" else kind
    trainer(accelerator=accelerator, devices=count, strategy=strategy, callbacks=[Peaks()]).fit(split)
    reached = [used.max_memory_allocated(place) for place in places]
    assert strategy.plan.schedule == schedule
    assert split.losses == pytest.approx(plain.losses, rel=1e-6)
    for ours, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-5, atol=1e-6)
    assert len(reached) == len(strategy.plan.peaks)
    for peak, planned, budget in zip(reached, strategy.plan.peaks, strategy.plan.budgets, strict=True):
        assert peak == pytest.approx(planned, rel=0.005)
        assert peak <= budget


@pytest.mark.parametrize(("kind", "count"), PLACES)
def test_stages_are_timed_and_no_device_works_longer_than_the_step(
    kind: str, count: int, lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path
) -> None:
    if kind == "simulated":
        torch.get_device_module(kind).reset_clock()
    strategy = autobalance.SelfBalanceStrategy(
        schedule="1f1b", micro_batches=4, pin={f"blocks.{index}": index * count // BLOCKS for index in range(BLOCKS)}
    )
    trainer(
        accelerator="gpu" if kind == "cuda" else kind,
        devices=count,
        strategy=strategy,
        callbacks=[autobalance.BalanceMonitor()],
        logger=lightning.loggers.CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=STEPS,
    ).fit(make_module(lightning))
    with (tmp_path / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert strategy.plan is not None
    assert len(strategy.plan.stages) == count
    for index in range(count):
        seconds = float(row[f"autobalance/stage_{index}/time_ms"]) / 1e3
        assert 0 < 4 * seconds <= float(row["autobalance/step_time_s"])
