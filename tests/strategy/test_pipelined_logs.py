"""Logs, metrics and predictions of steps in micro-batches through the Trainer are those of plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.strategy.split_runs import strategy_of

pytestmark = pytest.mark.usefixtures("simulated")


def make(lightning: ModuleType) -> Any:
    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)])
            self.train_f1 = MulticlassF1Score(3, average="macro")
            self.val_scores = torchmetrics.MetricCollection(
                {"accuracy": MulticlassAccuracy(3, average="micro"), "recall": MulticlassAccuracy(3)}, prefix="val/"
            )
            self.rows: list[dict[str, float]] = []

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:-1]:
                x = torch.relu(layer(x))
            logits: Tensor = self.layers[-1](x)
            return logits

        def training_step(self, batch: Any, index: int) -> dict[str, Any]:
            logits = self(batch["x"])
            losses = nn.functional.cross_entropy(logits, batch["y"], reduction="none")
            self.log("loss", losses.mean(), on_step=True, on_epoch=True, prog_bar=True)
            self.log("worst", losses.max(), on_step=True, on_epoch=True, reduce_fx="max")
            self.log("weighted", losses.mean(), on_step=False, on_epoch=True, batch_size=len(batch["y"]))
            self.log("f1 now", self.train_f1(logits, batch["y"]))
            self.log("f1", self.train_f1, on_step=False, on_epoch=True)
            return {"loss": losses.mean(), "logits": logits.detach(), "names": batch["names"]}

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            assert outputs["logits"].shape[0] == len(batch["y"])
            assert outputs["names"] == batch["names"]
            metrics = {**self.trainer.callback_metrics, **self.trainer.progress_bar_metrics}
            self.rows.append({name: float(value) for name, value in metrics.items()})

        def validation_step(self, batch: Any, index: int) -> None:
            logits = self(batch["x"])
            self.val_scores.update(logits, batch["y"])
            self.log_dict(self.val_scores)
            self.log("val/loss", nn.functional.cross_entropy(logits, batch["y"]))

        def predict_step(self, batch: Any, index: int) -> Any:
            return {"label": self(batch["x"]).argmax(1), "names": batch["names"]}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net()


def loader(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    xs = torch.randn(18, 8, generator=generator)
    rows: Any = [{"x": x, "y": index % 3, "names": f"image {index}"} for index, x in enumerate(xs)]
    return DataLoader(rows, batch_size=batch_size)


def compare(plain: Any, split: Any, plain_trainer: Any, split_trainer: Any) -> None:
    assert len(split.rows) == len(plain.rows) > 0
    for ours, theirs in zip(split.rows, plain.rows, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    final = {name: float(value) for name, value in plain_trainer.callback_metrics.items()}
    assert {name: float(value) for name, value in split_trainer.callback_metrics.items()} == pytest.approx(
        final, rel=1e-4, abs=1e-6
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_fit_logs_what_plain_lightning_logs(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    plain, split = make(lightning), make(lightning)
    alone = trainer(accelerator="cpu", devices=1, strategy="auto", max_epochs=2)
    alone.fit(plain, loader(8), loader(7))
    spread = trainer(strategy=strategy_of(lightning, schedule), max_epochs=2)
    spread.fit(split, loader(8), loader(7))
    assert spread.strategy.plan.micro_batches == 4
    compare(plain, split, alone, spread)


def test_batches_of_a_window_log_at_their_own_turn(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    plain, split = make(lightning), make(lightning)
    alone = trainer(accelerator="cpu", devices=1, strategy="auto", max_epochs=2, accumulate_grad_batches=4)
    alone.fit(plain, loader(2), loader(2))
    strategy = strategy_of(lightning, "1f1b", "accumulate")
    spread = trainer(strategy=strategy, max_epochs=2, accumulate_grad_batches=4)
    spread.fit(split, loader(2), loader(2))
    assert spread.strategy.plan.micro_batches == 4
    compare(plain, split, alone, spread)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_predictions_come_in_order(lightning: ModuleType, trainer: Callable[..., Any], schedule: str) -> None:
    plain, split = make(lightning), make(lightning)
    expected = trainer(accelerator="cpu", devices=1, strategy="auto").predict(plain, loader(8))
    spread = trainer(strategy=strategy_of(lightning, schedule))
    found = spread.predict(split, loader(8))
    assert spread.strategy.plan.micro_batches == 4
    assert [batch["names"] for batch in found] == [batch["names"] for batch in expected]
    assert [batch["label"].tolist() for batch in found] == [batch["label"].tolist() for batch in expected]


def test_what_micro_batches_log_in_a_dictionary_is_in_the_forecast(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    class LogsMany(type(make(lightning))):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = nn.functional.cross_entropy(self(batch["x"]), batch["y"])
            self.log_dict({f"loss {number}": loss for number in range(40)})
            return loss

        validation_step = lightning.LightningModule.validation_step

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if self.global_step == 1:  # after the test on a few samples, which here are more than a micro-batch
                for device in range(4):
                    torch.simulated.reset_peak_memory_stats(device)

    before = [torch.simulated.memory_allocated(index) for index in range(4)]
    strategy = strategy_of(lightning, "gpipe")
    trainer(strategy=strategy, max_epochs=2).fit(LogsMany(), loader(8))
    peaks = [torch.simulated.max_memory_allocated(index) - before[index] for index in range(4)]
    assert strategy.plan.micro_batches == 4
    assert peaks == pytest.approx(strategy.plan.peaks, rel=0.05)  # what metrics hold is not forecast to the byte
