"""The monitor tells what was predicted and what was reached, and says once what drifts from the plan."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import CASES, adamw, loader
from torch import Tensor

import autobalance

pytestmark = pytest.mark.usefixtures("simulated")


def model_of(lightning: ModuleType, case: str = "gpt") -> Any:
    torch.manual_seed(0)
    return CASES[case].make(lightning.LightningModule, adamw)


@pytest.mark.both_packages
def test_predicted_and_reached_are_in_the_log_and_in_the_logger(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str], tmp_path: Path
) -> None:
    torch.simulated.reset_clock()
    logger = lightning.loggers.CSVLogger(tmp_path)
    made = trainer(callbacks=[autobalance.BalanceMonitor(after=2)], logger=logger, log_every_n_steps=2)
    made.fit(model_of(lightning), loader(CASES["gpt"].batches(4)))
    (table,) = [said for said in messages if "peaks of the plan and of the run" in said]
    assert all(word in table for word in ("predicted", "reached", "budget", "step time, with", "layers.0"))
    assert "by the virtual clock of the simulated devices" in " ".join(table.split())
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [2, 4]
    for index, peak in enumerate(made.strategy.plan.peaks):
        assert float(rows[0][f"autobalance/device_{index}/predicted_peak_gib"]) == peak / 2**30
        assert float(rows[0][f"autobalance/device_{index}/peak_gib"]) == peak / 2**30
    assert float(rows[0]["autobalance/step_time_s"]) > 0
    # The virtual clock gives equal steps equal times.
    assert float(rows[0]["autobalance/step_time_s"]) == pytest.approx(float(rows[1]["autobalance/step_time_s"]))
    assert float(rows[0]["autobalance/predicted_step_time_s"]) == made.strategy.plan.step_time
    assert not any("host_step_time" in label for label in rows[0])


def test_what_the_host_computes_for_simulated_devices_is_not_told_as_their_time(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str], tmp_path: Path
) -> None:
    logger = lightning.loggers.CSVLogger(tmp_path)
    made = trainer(callbacks=[autobalance.BalanceMonitor(after=1)], logger=logger, log_every_n_steps=1)
    made.fit(model_of(lightning), loader(CASES["gpt"].batches(1)))
    (table,) = [" ".join(said.split()) for said in messages if "peaks of the plan and of the run" in said]
    assert "by the host's clock, which says how long it computes for simulated devices" in table
    assert "predicted for its forwards and backwards, without the optimizer's:" in table
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["autobalance/host_step_time_s"]) > 0
    assert "autobalance/step_time_s" not in row


def test_a_clock_that_starts_in_the_midst_of_a_step_tells_no_time_of_it(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    model = model_of(lightning)
    step = type(model).training_step

    def starts_the_clock(self: Any, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            torch.simulated.reset_clock()
        return step(self, batch, batch_idx)

    type(model).training_step = starts_the_clock
    trainer(callbacks=[autobalance.BalanceMonitor(after=2)]).fit(model, loader(CASES["gpt"].batches(2)))
    (table,) = [said for said in messages if "peaks of the plan and of the run" in said]
    assert "step time: not measured, as the clock was started in the midst of the step" in table


def test_a_peak_above_the_plan_is_said_once(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model, kept = model_of(lightning), []
    step = type(model).training_step

    def hoards(self: Any, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx >= 2 and not self.trainer.sanity_checking:
            kept.append(torch.zeros(2**16, device="simulated:1"))  # more in each step, in a way that no trial shows
        return step(self, batch, batch_idx)

    type(model).training_step = hoards
    with pytest.warns(UserWarning, match=r"simulated:1 has held .*, \d+% more than the .* of the plan") as told:
        trainer(callbacks=[autobalance.BalanceMonitor()]).fit(model, loader(CASES["gpt"].batches(6)))
    assert len([each for each in told if "drifts from its plan" in str(each.message)]) == 1


def test_blocks_that_are_called_in_another_order_are_said(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model = model_of(lightning)
    step = type(model).training_step

    def turns(self: Any, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.layers[1](torch.zeros(1, 2, 16, device=self.device))
        return step(self, batch, batch_idx)

    type(model).training_step = turns
    monitor = autobalance.BalanceMonitor()
    with pytest.warns(UserWarning, match="block 'layers.1' was called before 'embed'"):
        trainer(callbacks=[monitor]).fit(model, loader(CASES["gpt"].batches(3)))
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_trainer_without_a_plan_is_told_so(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    made = trainer(accelerator="cpu", devices=1, strategy="auto", callbacks=[autobalance.BalanceMonitor()])
    with pytest.warns(UserWarning, match="BalanceMonitor has nothing to compare"):
        made.fit(model_of(lightning), loader(CASES["gpt"].batches(1)))


def test_a_table_after_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="choose a number from 1 on"):
        autobalance.BalanceMonitor(after=0)
