"""What devices reach in micro-batches is what the plan says, to the byte, and no budget is exceeded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from models import CASES, adamw, loader, sgd
from torch import Tensor
from torchmetrics import MeanMetric

import autobalance
from autobalance.strategy.parts.metric_parts import MetricParts
from autobalance.strategy.registration import strategy_class

pytestmark = pytest.mark.usefixtures("simulated")


def plain_step(module: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = module.loss(batch)
    return loss


class Run:
    """A fit of one of the small models over three batches on two devices.

    Attributes:
        plan: of the run, at its end.
        planned, reached: peaks in bytes.
        model: the trained one.
    """

    def __init__(
        self,
        lightning: ModuleType,
        trainer: Callable[..., Any],
        case: str = "gpt",
        step: Callable[..., Any] = plain_step,
        optimizer: Callable[..., Any] = sgd,
        prepare: Callable[[Any], None] = lambda model: None,
        trains: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        strategy = strategy_class((lightning.__name__,))(**{"policy": "balanced", **options})
        made = trainer(strategy=strategy, devices=2, **(trains or {}))
        self.model = CASES[case].make(lightning.LightningModule, optimizer)
        type(self.model).training_step = step
        prepare(self.model)
        gc.collect()
        before = [torch.simulated.memory_allocated(index) for index in range(2)]
        for index in range(2):
            torch.simulated.reset_peak_memory_stats(index)
        made.fit(self.model, loader(CASES[case].batches(3)))
        self.plan = strategy.plan
        self.planned = list(self.plan.peaks)
        self.reached = [torch.simulated.max_memory_allocated(index) - before[index] for index in range(2)]
        self.micro_batches = self.plan.micro_batches


@pytest.mark.parametrize("micro_batches", [3, 8])
def test_the_test_before_the_first_batch_takes_no_more_than_the_plan_has(
    lightning: ModuleType, trainer: Callable[..., Any], micro_batches: int, messages: list[str]
) -> None:
    run = Run(lightning, trainer, schedule="1f1b", micro_batches=micro_batches)
    assert run.micro_batches == micro_batches
    assert run.reached == run.planned
    said = [each for each in messages if "one or two samples" in each]
    assert len(said) == (micro_batches == 8)
    assert all("gradients were not" in each for each in said)


def test_the_test_before_the_first_batch_takes_no_more_where_blocks_offload(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    budgets = dict.fromkeys(range(2), 135_000)
    options = {"schedule": "gpipe", "micro_batches": 4, "recompute": False, "offload": True, "max_memory": budgets}
    run = Run(lightning, trainer, optimizer=adamw, **options)
    assert "offload" in run.plan.saving
    assert run.reached == run.planned


def test_single_samples_are_compared_with_gradients_where_optimizer_state_leaves_room_for_them(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    def widen(model: Any) -> None:
        for name in ("a", "b", "c", "d"):
            wide = torch.nn.Sequential(torch.nn.Linear(16, 512), torch.nn.Linear(512, 16))
            setattr(model, name, wide)

    case = "residuals across blocks"
    run = Run(lightning, trainer, case, optimizer=adamw, prepare=widen, schedule="1f1b", micro_batches=8)
    assert run.reached == run.planned
    assert not [each for each in messages if "one or two samples" in each]


def test_single_samples_of_a_step_that_asks_for_gradients_itself_are_not_tested(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        outputs = module(batch[0])
        (slopes,) = torch.autograd.grad(outputs.sum(), module.a.weight, create_graph=True)
        return outputs.square().mean() + 0 * slopes.square().mean()

    run = Run(lightning, trainer, "skip in glue", step, schedule="1f1b", micro_batches=8)
    assert run.micro_batches == 8
    assert len([each for each in messages if "it was not tested" in each]) == 1


def test_a_loss_that_couples_single_samples_is_found_without_gradients(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        outputs = module(batch[0])
        return (outputs - outputs.detach().mean(0)).square().mean() + outputs.abs().mean()

    run = Run(lightning, trainer, "skip in glue", step, schedule="1f1b", micro_batches=8)
    assert run.micro_batches == 1
    assert any("couples the samples" in each for each in messages)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_devices_need_not_have_a_byte_more_than_the_plan_says(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, messages: list[str]
) -> None:
    options = {"schedule": schedule, "micro_batches": 4, "recompute": False}
    plan = Run(lightning, trainer, **options).plan
    gc.collect()
    capacities = [peak + torch.simulated.memory_allocated(index) for index, peak in enumerate(plan.peaks)]
    with autobalance.simulate(capacities):
        run = Run(lightning, trainer, plan=plan)
    assert run.reached == run.planned == list(plan.peaks)
    assert not [each for each in messages if "out of memory" in each.lower()]
    less = {index: peak - 1024 for index, peak in enumerate(plan.peaks)}
    try:
        run = Run(lightning, trainer, **options, max_memory=less)
    except autobalance.InfeasiblePlanError:
        return
    assert run.reached == run.planned
    assert all(run.reached[index] <= budget for index, budget in less.items())


def test_what_metrics_keep_of_each_micro_batch_is_planned_for(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = module.loss(batch)
        module.average(loss.detach())
        module.log("average", module.average)
        return loss

    def prepare(model: Any) -> None:
        model.average = MeanMetric()

    run = Run(lightning, trainer, step=step, prepare=prepare, schedule="1f1b", micro_batches=4)
    assert run.micro_batches == 4
    assert run.reached == run.planned


def test_copies_of_metrics_go_with_their_micro_batches() -> None:
    module = torch.nn.ModuleDict({"average": MeanMetric()})
    parts = MetricParts(module)
    gc.disable()
    try:
        with parts.recording():
            module["average"](torch.tensor(1.0))
        (copied,) = map(weakref.ref, parts._local.values())
        parts.finish([0], [1], [1.0])
        parts.forget()
        assert copied() is None
    finally:
        gc.enable()
