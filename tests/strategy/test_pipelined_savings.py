"""Blocks that save memory in micro-batches train as in plain Lightning, and reach the peaks that are planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.strategy.registration import strategy_class
from tests.strategy.split_runs import (
    CLASSES,
    DEVICES,
    WIDTH,
    compare,
    data,
    fit_alone,
    fit_split,
    in_turn,
    make,
    strategy_of,
)

pytestmark = pytest.mark.usefixtures("simulated")


class Block(nn.Module):
    """Two linear layers, with a width of its own between them."""

    def __init__(self, inner: int, outputs: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, inner), nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(torch.tanh(self.into(x)))
        return made


@dataclass(frozen=True)
class Case:
    """A model that does not fit unless it saves memory in one way.

    Attributes:
        options: of the strategy.
        saves: whether a plan does it in that way.
        budget: bytes of each device by schedule, less than what blocks take that keep all.
        inner: width of the blocks.
        size: samples of a batch.
    """

    options: dict[str, Any]
    saves: Callable[[Any], bool]
    budget: dict[str, int]
    inner: int = 4 * WIDTH
    size: int = 256


CASES = {
    "recompute": Case({"recompute": True}, lambda plan: "recompute" in plan.saving, {"gpipe": 88_000, "1f1b": 68_000}),
    "offload": Case(
        {"recompute": False, "offload": True},
        lambda plan: "offload" in plan.saving,
        {"gpipe": 88_000, "1f1b": 68_000},
    ),
    "host optimizer": Case(
        {"recompute": False, "offload": True},
        lambda plan: bool(plan.host_optimizer),
        {"gpipe": 140_000, "1f1b": 120_000},
        64 * WIDTH,
        8,
    ),
}


def build(inner: int) -> nn.Sequential:
    return nn.Sequential(*(Block(inner, outputs) for outputs in (WIDTH, WIDTH, WIDTH, CLASSES)))


def make_model(lightning: ModuleType, inner: int) -> Any:
    """A model of such blocks whose optimizer has state."""
    attributes = {
        "build": lambda self: build(inner),
        "configure_optimizers": lambda self: torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-3),
    }
    return make(lightning, **attributes)


@in_turn("name", "recompute", "recompute", "offload", "offload", "host optimizer")
def test_what_does_not_fit_otherwise_trains_as_in_plain_lightning(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, name: str
) -> None:
    case = CASES[name]
    loaders = [data(3 * case.size, case.size), data()]
    alone = fit_alone(lightning, trainer, make_model(lightning, case.inner), loaders)
    budgets = dict.fromkeys(range(DEVICES), case.budget[schedule])
    strategy = strategy_of(lightning, schedule, max_memory=budgets, **case.options)
    compare(fit_split(lightning, trainer, make_model(lightning, case.inner), loaders, strategy), alone)
    assert case.saves(strategy.plan)


def test_weights_that_come_from_the_host_train_as_in_plain_lightning(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    homes: set[str] = set()

    class Homes(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            homes.update(parameter.device.type for parameter in module.parameters())

    loaders, inner = [data(30), data()], CASES["host optimizer"].inner
    alone = fit_alone(lightning, trainer, make_model(lightning, inner), loaders)
    strategy = strategy_of(lightning, "1f1b", recompute=False)
    compare(fit_split(lightning, trainer, make_model(lightning, inner), loaders, strategy), alone)
    every = tuple(range(DEVICES))
    streamed = strategy_class((lightning.__name__,))(plan=replace(strategy.plan, streamed=every, host_optimizer=every))
    model = make_model(lightning, inner)
    split = fit_split(lightning, trainer, model, loaders, streamed, reaches=0, callbacks=[Homes()])
    compare(split, alone)
    assert homes == {"cpu"}
    assert streamed.plan.streamed == every
    state = [2 * sum(parameter.nbytes for parameter in layer.parameters()) for layer in model.layers]  # of Adam
    for index, planned in enumerate(strategy.plan.peaks):
        assert torch.simulated.max_memory_allocated(index) <= planned - state[index]
