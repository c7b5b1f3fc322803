from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autobalance

pytestmark = pytest.mark.usefixtures("simulated")


def make_module(lightning: ModuleType, accumulates: bool) -> Any:
    class Dropping(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4))
            self.losses: list[float] = []

        def on_train_start(self) -> None:
            torch.manual_seed(7)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            for layer in self.layers:
                x = nn.functional.dropout(layer(x), 0.2) + x
            return nn.functional.mse_loss(x, y)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))
            if batch_idx == len(self.trainer.train_dataloader) - 1:
                self.after = torch.rand(2)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.001)

        def train_dataloader(self) -> DataLoader[Any]:
            generator = torch.Generator().manual_seed(3)
            data = TensorDataset(*(torch.randn(24, 8, generator=generator) for _ in range(2)))
            return DataLoader(data, batch_size=2 if accumulates else 8)

    return Dropping()


@pytest.mark.parametrize("accumulates", [False, True])
def test_losses_with_dropout_depend_on_neither_schedule_nor_placement(
    accumulates: bool, lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    seen = []
    for schedule, devices in (("gpipe", (0, 0, 1, 1)), ("1f1b", (0, 0, 1, 1)), ("1f1b", (0, 1, 2, 3))):
        module = make_module(lightning, accumulates)
        strategy = autobalance.SelfBalanceStrategy(
            schedule=schedule,
            micro_batches="accumulate" if accumulates else 4,
            pin={f"layers.{index}": device for index, device in enumerate(devices)},
        )
        options = {"accumulate_grad_batches": 4} if accumulates else {}
        trainer(strategy=strategy, **options).fit(module)
        assert strategy.plan.schedule == schedule
        seen.append((module.losses, module.after, module))
    for losses, after, module in seen[1:]:
        assert losses == pytest.approx(seen[0][0], rel=1e-6)
        assert torch.equal(after, seen[0][1]), "generators stand where they stood"
        for ours, theirs in zip(module.parameters(), seen[0][2].parameters(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs.cpu())
    assert len(set(seen[0][0])) == len(seen[0][0])
