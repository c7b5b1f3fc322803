"""A trial takes whatever a real training step does, and neither the model nor the Trainer notices it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

pytestmark = pytest.mark.usefixtures("simulated")

WIDTH = 8


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randn(24, WIDTH, generator=generator), torch.randint(3, (24,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=8)


def make(lightning: ModuleType) -> Any:
    class Net(lightning.LightningModule):
        """Does in its step what real ones do."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))
            self.mean = MeanMetric()
            self.accuracy = MulticlassAccuracy(3)
            self.others = MetricCollection({"f1": MulticlassF1Score(3), "plain": MulticlassAccuracy(3)})
            self.weights = torch.tensor([1.0, 2.0, 3.0])  # a plain tensor
            self.lock = threading.Lock()  # cannot be copied
            self.losses: list[Tensor] = []
            self.largest = 0.0
            self.steps = 0

        def self_balance(self) -> list[nn.Module]:
            return [self.layers[0], self.layers[2], self.layers[3]]

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            inputs, labels = batch
            output = self.layers(inputs)
            loss = F.cross_entropy(output, labels, weight=self.weights.to(output.device))
            if (labels == 2).any():
                loss = loss * 1.5
            with self.lock:
                self.largest = max(self.largest, loss.item())
            self.losses.append(loss)
            self.steps += 1
            self.mean(loss)
            self.accuracy(output, labels)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log_dict({"mean": self.mean, "accuracy": self.accuracy, "number": 1.5, "steps": float(self.steps)})
            self.log_dict(self.others(output, labels))
            self.print("not in a trial")
            if self.logger is not None:
                self.logger.experiment.add_scalar("loss", loss.item(), self.global_step)
            return {"loss": loss, "extra": output.detach()}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    return Net()


def test_the_step_that_real_models_have(lightning: ModuleType, trainer: Callable[..., Any], capsys: Any) -> None:
    def run(**options: Any) -> tuple[Any, Any]:
        model = make(lightning)
        torch.manual_seed(5)
        made = trainer(max_epochs=2, **options)
        made.fit(model, data())
        return model, made

    split, four = run()
    assert capsys.readouterr().out.count("not in a trial") == 6
    plain, one = run(accelerator="cpu", devices=1, strategy="auto")
    assert (split.steps, len(split.losses)) == (plain.steps, len(plain.losses)) == (6, 6)
    assert split.largest == pytest.approx(plain.largest, rel=1e-5)
    assert {name: float(value) for name, value in four.callback_metrics.items()} == pytest.approx(
        {name: float(value) for name, value in one.callback_metrics.items()}, rel=1e-4
    )
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)
    notes = " ".join(four.strategy.plan.notes)
    assert "lock" in notes
    assert "only real data know" in notes


@pytest.mark.both_packages
def test_a_fit_after_a_trial_that_failed(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model = make(lightning)
    step = type(model).training_step

    def failing(self: Any, batch: Any, batch_idx: int) -> Any:
        step(self, batch, batch_idx)
        raise RuntimeError("this step is broken")

    before = {name: value.clone() for name, value in model.state_dict().items()}
    type(model).training_step = failing
    made = trainer()
    with pytest.raises(RuntimeError, match="this step is broken"):
        made.fit(model, data())
    assert (model.steps, model.losses) == (0, [])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    type(model).training_step = step
    again = trainer()
    again.fit(model, data())
    assert (again.global_step, model.steps) == (3, 3)
