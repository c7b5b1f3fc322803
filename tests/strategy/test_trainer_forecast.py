"""The peaks that a plan forecasts for the Trainer's run are those that the run reaches, to the byte."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autobalance.simulated import simulate
from tests.models import CASES, adamw, sgd

DEVICES = 4


def logging_values(base: type) -> type:
    class Logging(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("shown", loss, prog_bar=True)
            self.log("by step and epoch", loss * 2, on_step=True, on_epoch=True)
            self.log_dict({"number": 1.0, "largest": loss}, on_step=False, on_epoch=True, reduce_fx="max")
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation", self.loss(batch))

    return Logging


def returning_more(base: type) -> type:
    class ReturnsMore(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "kept": loss.detach() * 2}

    return ReturnsMore


def optimizing_by_hand(base: type) -> type:
    class ByHand(base):  # type: ignore[misc, valid-type]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    return ByHand


def validating(base: type) -> type:
    class Validates(base):  # type: ignore[misc, valid-type]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    return Validates


@dataclass(frozen=True)
class Run:
    """How the Trainer trains a model."""

    name: str = "gpt"
    adapt: Callable[[type], type] = lambda base: base
    optimizer: Callable[[Any], Any] = adamw
    batches: int = 4
    validates: bool = False
    larger: int = 4  # a validation batch is as large as so many training batches
    options: dict[str, Any] = field(default_factory=dict)
    schedule: dict[int, int] | None = None


RUNS: dict[str, Run] = {
    **{name: Run(name) for name in ("gpt", "batch norm convnet", "lstm", "many arguments", "q is k is v")},
    "two steps": Run(batches=2),
    "SGD": Run(optimizer=sgd),
    "logged values": Run(adapt=logging_values),
    "logged values, two epochs": Run(adapt=logging_values, options={"max_epochs": 2}),
    "accumulation": Run(batches=8, options={"accumulate_grad_batches": 4}),
    "accumulation and logged values": Run(
        adapt=logging_values, batches=8, options={"accumulate_grad_batches": 4, "max_epochs": 2}
    ),
    "clipping by norm": Run(options={"gradient_clip_val": 0.1}),
    "clipping by norm, small": Run("residuals across blocks", options={"gradient_clip_val": 0.1}),
    "clipping by value": Run(options={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": Run(options={"precision": "bf16-mixed"}),
    "bf16-true": Run(options={"precision": "bf16-true"}),
    "16-mixed": Run(options={"precision": "16-mixed", "gradient_clip_val": 0.1}),
    "manual optimization": Run(adapt=optimizing_by_hand),
    "a step that returns more": Run("residuals across blocks", adapt=returning_more),
    "larger validation": Run(adapt=validating, validates=True),
    "larger validation and logged values": Run(
        "residuals across blocks", adapt=logging_values, validates=True, options={"max_epochs": 2}
    ),
    "logged values of a check before training": Run(adapt=logging_values, validates=True),
    "logged values of a check before training, of one size": Run(adapt=logging_values, validates=True, larger=1),
    "logged values of a validation in the midst of the epoch": Run(
        adapt=logging_values, validates=True, options={"val_check_interval": 2}
    ),
    "accumulation on schedule": Run(batches=8, schedule={0: 1, 1: 4}, options={"max_epochs": 2}),
    "accumulation on schedule, first": Run(batches=8, schedule={0: 4}),
}


def fit(run: Run, capacities: int | list[int] = DEVICES, plan: Any = None) -> tuple[Any, list[int]]:
    """Train, and return the plan and the peaks that were reached."""
    package = importlib.import_module("lightning.pytorch")
    gc.collect()
    case = CASES[run.name]
    model = case.make(package.LightningModule, run.optimizer)
    model.__class__ = run.adapt(type(model))
    larger = [tuple(torch.cat([part] * run.larger) for part in batch) for batch in case.batches(2)]
    with simulate(capacities):
        from autobalance import SelfBalanceStrategy

        trainer = package.Trainer(
            accelerator="simulated",
            devices=DEVICES,
            strategy=SelfBalanceStrategy(plan=plan, retry_on_oom=False),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[package.callbacks.GradientAccumulationScheduler(dict(run.schedule))] if run.schedule else None,
            **{"max_epochs": 1, **run.options},
        )
        trainer.fit(
            model,
            DataLoader(case.batches(run.batches), batch_size=None),
            DataLoader(larger, batch_size=None) if run.validates else None,
        )
        return trainer.strategy.plan, [torch.simulated.max_memory_allocated(index) for index in range(DEVICES)]


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers", "ignore:You called `self.log")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize("name", RUNS)
def test_reached_peaks_are_the_forecast_ones(name: str) -> None:
    plan, reached = fit(RUNS[name])
    assert list(plan.peaks) == reached


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.parametrize("name", ["gpt", "many arguments"])
def test_run_fits_in_exactly_what_was_forecast_and_in_no_kibibyte_less(name: str) -> None:
    plan, _ = fit(RUNS[name])
    _, reached = fit(RUNS[name], list(plan.peaks), plan)
    assert list(plan.peaks) == reached
    for device in set(plan.assignment):
        smaller = [peak - 1024 * (index == device) for index, peak in enumerate(plan.peaks)]
        with pytest.raises(torch.OutOfMemoryError, match=f"simulated:{device} out of memory"):
            fit(RUNS[name], smaller, plan.with_peaks([0] * DEVICES))  # the plan itself would be refused
