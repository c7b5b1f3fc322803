"""A model moves between plans in the midst of a run, and nothing is lost."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from models import CASES, adamw, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autobalance
from autobalance.execution.micro_batch import current_micro_batch
from autobalance.strategy.planning.rebalance import move_to_plan, send_batch
from autobalance.strategy.planning.replan import Learned

STEPS, WIDTH = 6, 16


def moved_at(lightning: ModuleType, step: int, order: tuple[int, ...]) -> Any:
    """A callback that gives every device's part to another device before one step, and notes the fullest moments."""

    class Moves(lightning.Callback):
        losses: list[float]

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.losses = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx != step:
                return
            strategy, placed = trainer.strategy, trainer.strategy._placed
            before = placed.plan
            after = replace(before, assignment=tuple(order[i] for i in before.assignment), root=order[before.root])
            placed.remove()
            placed.plan = after

            def place() -> None:
                strategy._adopt(placed)

            move_to_plan(module, before, after, strategy.parallel_devices, trainer.optimizers, place)
            send_batch(batch, strategy.root_device)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            self.losses.append(float(outputs["loss"]))
            for parameter in module.parameters():
                state = trainer.optimizers[0].state.get(parameter, {})
                assert {value.device for key, value in state.items() if key != "step"} <= {parameter.device}

    return Moves()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("case", ["tied embedding", "batch norm convnet", "skip in glue"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_goes_on_bit_for_bit_after_a_move(
    lightning: ModuleType, trainer: Callable[..., Any], case: str, accumulate: int
) -> None:
    def run(step: int) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model, moves = CASES[case].make(lightning.LightningModule, adamw), moved_at(lightning, step, (1, 2, 3, 0))
        strategy = autobalance.SelfBalanceStrategy(micro_batches=1)
        made = trainer(strategy=strategy, callbacks=[moves], accumulate_grad_batches=accumulate)
        made.fit(model, loader(CASES[case].batches(STEPS)))
        return moves.losses, model.state_dict()

    losses, weights = run(STEPS)
    found, other = run(3)
    assert found == losses
    for name, value in weights.items():
        assert torch.equal(other[name], value), name


def test_the_batch_size_finder_finds_the_largest_batch_that_fits(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 4
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def train_dataloader(self) -> Any:
            return DataLoader(torch.ones(512, WIDTH), self.batch_size)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = torch.tanh(layer(batch))
            return batch.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fits(size: int) -> bool:
        model, made = Model(), trainer(limit_train_batches=1, strategy=whole())
        model.batch_size = size
        try:
            made.fit(model)
        except autobalance.InfeasiblePlanError:
            return False
        return True

    def whole() -> Any:
        return autobalance.SelfBalanceStrategy(micro_batches=1)

    tuner = importlib.import_module(f"{lightning.__name__}.tuner").Tuner
    with autobalance.simulate([32 * 1024] * 4):
        model, made = Model(), trainer(strategy=whole())
        found = tuner(made).scale_batch_size(model, init_val=4, steps_per_trial=1)
        assert found == model.batch_size
        assert fits(found)
        assert not fits(2 * found)
        assert found > 4
        assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.usefixtures("simulated")
def test_batches_flow_through_the_stages_as_before_where_no_other_plan_fits(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            micro_batch = current_micro_batch()
            if micro_batch is not None and self.training:
                seen[-1].append((micro_batch.index, x.device.index))
            return super().forward(x)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Noting(WIDTH, WIDTH) for _ in range(4))

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = torch.tanh(layer(batch))
            return batch.square().mean()

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 2:
                with pytest.raises(autobalance.InfeasiblePlanError):
                    self.trainer.strategy.rebalance(Learned(unforeseen=dict.fromkeys(range(4), 2**62)), [batch])
            seen.append([])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    seen: list[list[tuple[int, int]]] = [[]]
    strategy = autobalance.SelfBalanceStrategy(policy="balanced", micro_batches=4, schedule="1f1b")
    trainer(strategy=strategy).fit(Model(), DataLoader(torch.ones(32, WIDTH), 8))
    *_, before, _, after = seen
    assert [number for number, _ in before] != sorted(number for number, _ in before)
    assert after == before


@pytest.mark.usefixtures("simulated")
def test_planning_is_not_tried_at_every_batch_where_peaks_are_beyond_all_plans(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = torch.tanh(layer(batch))
            if batch_idx == 1:  # which no trial has seen
                torch.empty(2**20, device=batch.device)
            return batch.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    tried: list[Any] = []

    def rebalance(learned: Learned, batch: Any = ()) -> None:
        tried.append(learned)
        raise autobalance.InfeasiblePlanError("nothing fits", need=(2,), budget=(1,))

    made = trainer(strategy=autobalance.SelfBalanceStrategy(micro_batches=1, rebalance=True))
    made.strategy.rebalance = rebalance
    with pytest.warns(UserWarning, match=r"has held .* planning was tried again, but no plan fits: nothing fits"):
        made.fit(Model(), DataLoader(torch.ones(48, WIDTH), 8))
    assert len(tried) == 1
