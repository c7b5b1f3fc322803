"""Batches of a window run one after the other where a step finds in the module what the one before has left there."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategy import split_runs
from tests.strategy.split_runs import WIDTH, Fitted, compare, data, fit, fit_alone, fit_split, strategy_of

pytestmark = pytest.mark.usefixtures("simulated")


def make(lightning: ModuleType, **attributes: Any) -> Any:
    """The classifier without validation."""
    return split_runs.make(lightning, validation_step=lightning.LightningModule.validation_step, **attributes)


def fit_windows(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    schedule: str,
    step: Callable[..., Tensor],
    build: Any,
    batches: int,
    split_by: Callable[..., Fitted],
) -> tuple[Fitted, Fitted]:
    """Two epochs of batches of two, of which four add up their gradients, split and alone, compared."""
    attributes = {"training_step": step, **({} if build is None else {"build": build})}
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 4}
    loaders = [data(2 * batches, 2)]
    alone = fit_alone(lightning, trainer, make(lightning, **attributes), loaders, **options)
    made = strategy_of(lightning, schedule, "accumulate")
    split = split_by(lightning, trainer, make(lightning, **attributes), loaders, strategy=made, **options)
    compare(split, alone)
    return split, alone


def counts(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    loss: Tensor = self.loss(batch) / self.calls
    return loss


def averages(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss(batch) / getattr(self, "average", 1.0)
    self.average = 0.9 * getattr(self, "average", 1.0) + 0.1 * float(loss.detach())
    return loss


def appends(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss(batch)
    self.seen = getattr(self, "seen", [])
    self.seen.append(batch_idx)
    scaled: Tensor = loss * (1 + sum(self.seen))
    return scaled


def differentiates(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """A step that does not run without a graph."""
    loss = counts(self, batch, batch_idx)
    (slope,) = torch.autograd.grad(loss, self.layers[3].weight, create_graph=True)
    regular: Tensor = loss + 0.1 * slope.square().sum()
    return regular


def carries(self: Any, batch: Any, batch_idx: int) -> Tensor:
    inputs, labels = batch
    hidden = getattr(self, "hidden", None)
    scores = self(inputs if hidden is None else inputs + hidden[: len(inputs)].mean())
    self.hidden = scores.detach()
    return nn.functional.cross_entropy(scores, labels)


def remembers(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """What a block leaves is read after the forward, when another batch may have come by."""
    loss: Tensor = self.loss(batch) + self.layers[0].penalty
    return loss


class Penalised(nn.Linear):
    penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.penalty = float(y.detach().square().mean())
        return y


def moves(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss(batch) * self.scale.mean()
    with torch.no_grad():
        self.scale.mul_(1.1)
    return loss


def penalised(self: Any) -> nn.Sequential:
    return nn.Sequential(Penalised(WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def scaled(self: Any) -> nn.Sequential:
    self.register_buffer("scale", torch.ones(1))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


@pytest.mark.parametrize(
    ("lightning", "schedule", "step", "build", "named"),
    [
        ("pytorch_lightning", "1f1b", counts, None, "calls"),
        ("pytorch_lightning", "gpipe", differentiates, None, "calls"),
        ("lightning.pytorch", "gpipe", averages, None, "average"),
        ("pytorch_lightning", "gpipe", appends, None, "seen"),
        ("lightning.pytorch", "1f1b", carries, None, "hidden"),
        ("pytorch_lightning", "1f1b", remembers, penalised, "layers.0.penalty"),
        ("lightning.pytorch", "1f1b", moves, scaled, "scale"),
    ],
    indirect=["lightning"],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_step_that_carries_something_over_sees_its_batches_in_order(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    messages: list[str],
    schedule: str,
    step: Callable[..., Tensor],
    build: Any,
    named: str,
) -> None:
    split, alone = fit_windows(lightning, trainer, schedule, step, build, 6, fit)
    plan = split.trainer.strategy.plan
    assert (plan.micro_batches, plan.accumulated) == (1, False)
    for name in {"calls", "average", "seen"} & vars(alone.model).keys():
        assert getattr(split.model, name) == pytest.approx(getattr(alone.model, name), rel=1e-4)
    (said,) = [each for each in messages if "from batch to batch" in each]
    assert f"the step changes `{named}` of the module" in said


def caches(self: Any, batch: Any, batch_idx: int) -> Tensor:
    if not hasattr(self, "ones"):
        self.ones = torch.ones(1, device=self.device)
        self.calls = 1
    loss: Tensor = self.loss(batch) * self.ones.sum()
    self.log("loss", loss)
    return loss


def normalised(self: Any) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.0)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("lightning", "schedule", "step", "build"),
    [
        ("pytorch_lightning", "1f1b", caches, None),
        ("lightning.pytorch", "1f1b", caches, normalised),
    ],
    indirect=["lightning"],
    ids=["caches", "batch norm"],
)
def test_what_is_made_once_and_statistics_of_batch_norms_let_windows_flow(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    messages: list[str],
    schedule: str,
    step: Callable[..., Tensor],
    build: Any,
) -> None:
    split, _ = fit_windows(lightning, trainer, schedule, step, build, 8, fit_split)
    assert split.trainer.strategy.plan.accumulated
    assert not any("from batch to batch" in each for each in messages)


def test_a_window_of_one_batch_is_not_tested_and_a_given_plan_stays(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 4}
    planned = strategy_of(lightning, "1f1b", "accumulate")
    fit(lightning, trainer, make(lightning), [data(2, 2)], strategy=planned, **options)
    assert planned.plan.accumulated
    attributes = {"training_step": counts}
    alone = fit_alone(lightning, trainer, make(lightning, **attributes), [data(12, 2)], **options)
    made = strategy_of(lightning, "1f1b", "accumulate", plan=planned.plan)
    split = fit(lightning, trainer, make(lightning, **attributes), [data(12, 2)], strategy=made, **options)
    compare(split, alone)
    assert any("The given plan counts on split batches" in each for each in messages)
