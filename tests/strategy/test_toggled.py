"""Parameters that have gradients only for some batches, as `toggle_optimizer` has it, train as in plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from autobalance.strategy.parts.toggled import Toggled
from tests.strategy.split_runs import (
    WAYS,
    by_schedule,
    by_way,
    compare,
    data,
    fit,
    fit_alone,
    fit_split,
    in_turn,
    make,
    strategy_of,
)


def halved(lightning: ModuleType, in_step: bool) -> Any:
    """One optimizer, of which each of two others has half: they take turns from window to window."""

    def half(self: Any, batch_idx: int) -> Any:
        return self.halves[batch_idx // self.every % 2]

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if in_step:
            self.toggle_optimizer(half(self, batch_idx))
        loss = self.loss(batch)
        if in_step:
            self.untoggle_optimizer(half(self, batch_idx))
        return loss

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        if not in_step:
            self.toggle_optimizer(half(self, batch_idx))

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not in_step:
            self.untoggle_optimizer(half(self, batch_idx))

    hooks = (training_step, on_train_batch_start, on_train_batch_end)
    made = make(lightning, **{hook.__name__: hook for hook in hooks})
    made.halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (made.layers[:2], made.layers[2:])]
    return made


def run_both(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, way: str, in_step: bool, expected: int = 4
) -> None:
    """The same fit in parts and alone, compared; no plan knows which parts of the model later batches train."""
    micro_batches, options, size = WAYS[way]
    split, plain = (halved(lightning, in_step) for _ in range(2))
    split.every = plain.every = options.get("accumulate_grad_batches", 1)
    loaders = [data(40, size), data(8)]
    alone = fit_alone(lightning, trainer, plain, loaders, **options)
    strategy = strategy_of(lightning, schedule, micro_batches)
    compare(fit(lightning, trainer, split, loaders, strategy=strategy, **options), alone)
    assert strategy.plan.micro_batches == expected
    assert all(parameter.requires_grad for parameter in split.parameters())


@pytest.mark.usefixtures("simulated")
@in_turn("way", *WAYS)
def test_parts_of_a_model_may_take_turns_between_steps(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, way: str
) -> None:
    run_both(lightning, trainer, schedule, way, in_step=False)


@pytest.mark.usefixtures("simulated")
@by_schedule
@by_way
def test_parts_of_a_model_take_turns_within_steps_only_where_one_forward_comes_after_the_other(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str], schedule: str, way: str
) -> None:
    run_both(lightning, trainer, schedule, way, in_step=True, expected=1 if schedule == "1f1b" else 4)
    told = "the step changes for which parameters gradients are made (`layers.2.0.weight`, `layers.2.0.bias`, `layers"
    assert sum(told in said and "schedule='gpipe'" in said for said in messages) == (schedule == "1f1b")


@pytest.mark.usefixtures("simulated")
def test_an_optimizer_that_has_all_parameters_may_be_toggled_in_a_step(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        with self.toggled_optimizer(self.optimizers()):
            return self.loss(batch)

    split, plain = (make(lightning, training_step=training_step) for _ in range(2))
    alone = fit_alone(lightning, trainer, plain, [data(), data()])
    compare(fit_split(lightning, trainer, split, [data(), data()], strategy_of(lightning, "1f1b")), alone)


def test_flags_that_are_as_before_when_operations_run_are_no_reason() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Toggled(module) as toggled:
        module.requires_grad_(False)
        module.requires_grad_(True)
        module(torch.ones(1, 2))
        module[1].bias.requires_grad = True
        module(torch.ones(1, 2))
    assert toggled.against("1f1b") is None
    with Toggled(module) as toggled:
        module[1].bias.requires_grad = False
        module(torch.ones(1, 2))
    assert "(`1.bias`)" in str(toggled.against("1f1b"))
    assert toggled.against("gpipe") is None
