"""The monitor tells how long stages take, as the clock of simulated devices has it and as products of matrices need."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autobalance
from autobalance.devices.device import Device
from autobalance.strategy.watching.stage_times import StageTimes

STAGES, PARTS = 4, 4
WIDTH, ROWS = 16, 16
FLOPS = 1e6
PRODUCT = 2 * ROWS * WIDTH**2 / FLOPS
"""Seconds of a layer's forward on a micro-batch; its backward has two products. All else is far quicker."""
LAYERS = (1, 3, 2, 1)
"""Linear layers in each block."""


def make_uneven(lightning: ModuleType, visits: int = 1, has_embedding: bool = True) -> Any:
    """Blocks of one to three layers, each on a device of its own, or two on each in turn."""

    class Uneven(lightning.LightningModule):  # type: ignore[name-defined, misc] # one of two packages
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, WIDTH) if has_embedding else nn.Identity()
            counts = LAYERS * visits
            self.layers = nn.ModuleList(
                nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))) for count in counts
            )

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = self.embed(batch[0])
            for layer in self.layers:
                x = layer(x)
            loss: Tensor = x.square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    return Uneven()


def fit(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    path: Path,
    schedule: str,
    micro_batches: Any,
    visits: int = 1,
    has_embedding: bool = True,
    clock: bool = True,
) -> tuple[Any, dict[str, str]]:
    """The plan of a fit of three steps, and what its monitor has logged of the second."""
    boxes = [Device(f"device {index}", 2**30, flops=FLOPS, bandwidth=1e12) for index in range(STAGES)]
    accumulate = PARTS if micro_batches == "accumulate" else 1
    samples = 3 * PARTS * ROWS
    inputs = torch.randint(0, 8, (samples,)) if has_embedding else torch.randn(samples, WIDTH)
    data = DataLoader(TensorDataset(inputs), batch_size=PARTS * ROWS // accumulate)
    logger = lightning.loggers.CSVLogger(path)
    with autobalance.simulate(boxes):
        if clock:
            torch.get_device_module("simulated").reset_clock()
        strategy = autobalance.SelfBalanceStrategy(
            schedule=schedule,
            micro_batches=micro_batches,
            pin={f"layers.{index}": index % STAGES for index in range(visits * STAGES)},
        )
        monitor = autobalance.BalanceMonitor(after=2 * accumulate)
        run = trainer(
            strategy=strategy,
            accumulate_grad_batches=accumulate,
            callbacks=[monitor],
            logger=logger,
            log_every_n_steps=2 * accumulate,
        )
        run.fit(make_uneven(lightning, visits, has_embedding), data)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return run.strategy.plan, next(csv.DictReader(file))


def times(row: dict[str, str], name: str, stages: int = STAGES) -> list[float]:
    return [float(row[f"autobalance/stage_{index}/{name}"]) / 1e3 for index in range(stages)]


@pytest.mark.parametrize(
    ("lightning", "schedule", "micro_batches", "visits"),
    [
        ("pytorch_lightning", "naive", 1, 1),
        ("lightning.pytorch", "gpipe", PARTS, 1),
        ("pytorch_lightning", "1f1b", PARTS, 1),
        ("lightning.pytorch", "1f1b", "accumulate", 1),
        ("pytorch_lightning", "looped", PARTS, 2),
    ],
    indirect=["lightning"],
    ids=["naive", "gpipe", "1f1b", "accumulated", "looped"],
)
def test_a_stage_takes_the_time_of_its_products(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    tmp_path: Path,
    messages: list[str],
    schedule: str,
    micro_batches: Any,
    visits: int,
) -> None:
    plan, row = fit(lightning, trainer, tmp_path, schedule, micro_batches, visits)
    assert (plan.schedule, len(plan.stages)) == (schedule, visits * STAGES)
    rows = PARTS if schedule == "naive" else 1  # a whole batch is as large as all its parts
    expected = [3 * count * PRODUCT * rows for count in LAYERS * visits]
    assert times(row, "time_ms", len(expected)) == pytest.approx(expected, rel=0.01)
    assert times(row, "predicted_ms", len(expected)) == pytest.approx(expected, rel=0.01)
    (table,) = [said for said in messages if "times of the stages" in said]
    assert "for a micro-batch there and back" in table


def test_a_stage_whose_inputs_have_no_gradient_ends_with_that_of_its_weights(
    lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path
) -> None:
    _, row = fit(lightning, trainer, tmp_path, "1f1b", PARTS, has_embedding=False)
    expected = [3 * count * PRODUCT for count in LAYERS]
    expected[0] -= PRODUCT  # the gradient of the batch
    assert times(row, "time_ms") == pytest.approx(expected, rel=0.01)


def test_without_a_clock_stages_have_no_times_and_the_table_says_so(
    lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path, messages: list[str]
) -> None:
    _, row = fit(lightning, trainer, tmp_path, "naive", 1, clock=False)
    assert not any("autobalance/stage_" in name for name in row)
    (table,) = [said for said in messages if "times of the stages" in said]
    assert "not measured" in table
    assert "torch.simulated.reset_clock()" in table


def test_a_copy_of_a_timed_model_is_not_timed(lightning: ModuleType) -> None:
    model = make_uneven(lightning)
    with autobalance.simulate(1):
        inputs = [torch.zeros(2, dtype=torch.long)]
        profile = autobalance.profile(model, inputs, step=lambda twin, batch: type(model).training_step(twin, batch, 0))
        plan = autobalance.plan(profile, "1x1GiB")
        times = StageTimes(model, plan, [torch.device("simulated", 0)])
        torch.get_device_module("simulated").reset_clock()
        times.start_again()
        copy.deepcopy(model).layers[0](torch.ones(1, WIDTH))
        assert times.read() == ()
        times.start_again()
        model.layers[0](torch.ones(1, WIDTH))
        assert times.read() == (0.0,)  # nothing runs on the device
