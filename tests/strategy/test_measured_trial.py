"""Blocks are measured by the step that Lightning runs, in the middle of a fit that never notices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autobalance.blocks import find_blocks
from autobalance.measuring.measure import measure
from autobalance.measuring.measurement import Measurement
from autobalance.profiling.lazy import learn_shapes
from autobalance.profiling.trial import Batch
from autobalance.strategy.trials.trial import LightningTrial

WIDTH = 8


def make(lightning: ModuleType, manual: bool = False, lazy: bool = False) -> Any:
    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.automatic_optimization = not manual
            second = nn.LazyLinear(WIDTH) if lazy else nn.Linear(16, WIDTH)
            self.layers = nn.ModuleList(
                [nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)), second]
            )
            self.losses: list[float] = []

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            hidden = self.layers[0](batch).relu()
            loss = self.layers[1](hidden).pow(2).mean()
            self.log("loss", loss)
            self.losses.append(loss.item())
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Net()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("manual", [False, True])
def test_training_is_bit_by_bit_that_without_measuring(
    lightning: ModuleType, trainer: Callable[..., Any], manual: bool, precision: str
) -> None:
    found: list[tuple[Measurement, ...]] = []
    left: list[int] = []

    class Measures(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx != 1:
                return
            gc.collect()
            before = torch.simulated.memory_allocated(0)
            sampled = Batch("train batch", "train", batch)
            found.append(measure(module, sampled, find_blocks(module), LightningTrial(trainer), "simulated:0"))
            gc.collect()
            left.append(torch.simulated.memory_allocated(0) - before)

    def run(callbacks: list[Any]) -> Any:
        model = make(lightning, manual)
        torch.manual_seed(5)
        plain = {"accelerator": "cpu", "devices": 1, "strategy": "auto", "precision": precision}
        made = trainer(callbacks=callbacks, max_epochs=2, **plain)
        made.fit(model, DataLoader(torch.randn(20, WIDTH), batch_size=8, shuffle=True))
        return model

    measured, plain = run([Measures()]), run([])
    assert measured.losses == plain.losses
    assert len(found) == 2
    assert left == [0] * 2
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in measured.state_dict().items())
    first, second = found[0]
    assert first.static == 7 * 512  # two weights, two biases, two statistics and their counter
    assert (first.forward_time > 0, second.backward_time > 0) == (True, True)


@pytest.mark.usefixtures("simulated")
def test_shapes_of_lazy_modules_are_found_by_the_step_that_lightning_runs(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    model = make(lightning, lazy=True)
    static: list[int] = []

    class Looks(lightning.Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            trial, batch = LightningTrial(trainer), Batch("train batch", "train", torch.randn(8, WIDTH))
            learn_shapes(module, trial, batch)
            static.append(measure(module, batch, find_blocks(module), trial, "simulated:0")[1].static)
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer(callbacks=[Looks()], accelerator="cpu", devices=1, strategy="auto").fit(
            model, DataLoader(torch.randn(8, WIDTH), batch_size=8)
        )
    assert static == [16 * WIDTH * 4 + 512]
    assert isinstance(model.layers[1], nn.LazyLinear)
