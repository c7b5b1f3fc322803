"""Plans whose blocks save memory, run by the Trainer: the same training, plain checkpoints, peaks as forecast."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from models import CASES, adamw, loader
from torch import Tensor

from autobalance import Plan
from autobalance.strategy.registration import strategy_class

pytestmark = pytest.mark.usefixtures("simulated")
CASE, STEPS = "batch norm convnet", 4
WAYS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "recompute": lambda plan: {"saving": ("recompute",) * len(plan.blocks)},
    "offload": lambda plan: {"saving": ("offload",) * len(plan.blocks)},
    "weight streaming": lambda plan: {
        "streamed": tuple(range(len(plan.blocks))),
        "host_optimizer": tuple(range(len(plan.devices))),
    },
    "host optimizer": lambda plan: {"host_optimizer": tuple(range(len(plan.devices)))},
}


class Run:
    """A fit of one of the small models; `losses` of each step, `weights` after the last, `peaks` in bytes."""

    def __init__(self, lightning: ModuleType, trainer: Callable[..., Any], **options: Any) -> None:
        self.losses: list[float] = []
        run = self

        class Losses(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
                run.losses.append(float(outputs["loss"]))
                run.homes = {parameter.device.type for parameter in module.parameters()}

        self.homes: set[str] = set()
        strategy = strategy_class((lightning.__name__,))(**options)
        made = trainer(strategy=strategy, devices=2, callbacks=[Losses()])
        torch.manual_seed(0)
        model = CASES[CASE].make(lightning.LightningModule, adamw)
        gc.collect()
        before = [torch.simulated.memory_allocated(index) for index in range(2)]  # results of other Trainers
        for index in range(2):
            torch.simulated.reset_peak_memory_stats(index)
        made.fit(model, loader(CASES[CASE].batches(STEPS)))
        self.peaks = [torch.simulated.max_memory_allocated(index) - before[index] for index in range(2)]
        # A run is kept for other tests: neither its Trainer nor its model, which hold results on a device.
        self.weights: dict[str, Tensor] = model.state_dict()
        self.plan: Plan = strategy.plan

    def assert_trained_as(self, other: Run) -> None:
        """But for the order of operations in the optimizer's step."""
        assert self.losses == pytest.approx(other.losses, abs=1e-5)
        for name, value in self.weights.items():
            torch.testing.assert_close(value, other.weights[name], rtol=0, atol=1e-4)


KEPT: dict[str, Run] = {}


def kept_by(lightning: ModuleType, trainer: Callable[..., Any]) -> Run:
    """The run in which all blocks keep what they save, made once."""
    if lightning.__name__ not in KEPT:
        KEPT[lightning.__name__] = Run(lightning, trainer, policy="balanced", recompute=False)
    return KEPT[lightning.__name__]


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_that_saves_memory_trains_the_same(lightning: ModuleType, trainer: Callable[..., Any], way: str) -> None:
    kept = kept_by(lightning, trainer)
    run = Run(lightning, trainer, plan=replace(kept.plan, **WAYS[way](kept.plan)))
    run.assert_trained_as(kept)
    assert run.homes == ({"cpu"} if way == "weight streaming" else {"simulated"})
    assert all(mine <= theirs for mine, theirs in zip(run.peaks, kept.peaks, strict=True))
    assert run.peaks != kept.peaks or way == "recompute"


@pytest.mark.parametrize("asked", [{"recompute": True}, {"recompute": False, "offload": True}])
def test_what_does_not_fit_is_trained_within_its_budget_where_blocks_may_save_memory(
    lightning: ModuleType, trainer: Callable[..., Any], asked: dict[str, Any]
) -> None:
    kept = kept_by(lightning, trainer)
    budget = max(kept.peaks) - 512
    run = Run(lightning, trainer, policy="balanced", max_memory={0: budget, 1: budget}, **asked)
    run.assert_trained_as(kept)
    assert max(run.peaks) <= budget
    assert run.peaks == list(run.plan.peaks)
    if "offload" in asked:
        assert "offload" in run.plan.saving or run.plan.streamed or run.plan.host_optimizer
    else:
        assert "recompute" in run.plan.saving
