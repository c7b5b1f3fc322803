"""A small model fitted in micro-batches on four simulated devices, beside plain Lightning on one device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from threads import no_thread_left
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from autobalance.strategy.registration import strategy_class

WIDTH, CLASSES, DEVICES = 8, 3, 4
RUNS = [("pytorch_lightning", "gpipe"), ("lightning.pytorch", "1f1b")]
by_schedule = pytest.mark.parametrize(("lightning", "schedule"), RUNS, indirect=["lightning"])
"""Both schedules and both packages, in two runs."""
WAYS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "micro-batches": (4, {}, 8),
    "a window": ("accumulate", {"accumulate_grad_batches": 4}, 2),
}
"""The strategy's micro-batches, the Trainer's options, and samples of a batch: four parts and eight samples a step."""
by_way = pytest.mark.parametrize("way", WAYS)


def in_turn(names: str | tuple[str, ...], *values: Any) -> pytest.MarkDecorator:
    """Each of `values` once, under both schedules and packages by turns: where the two have little to do with it.

    Args:
        names: of what the test is given.
        values: one for each run; with several names, a tuple.
    """
    given = (names,) if isinstance(names, str) else names
    rows = [
        (*RUNS[index % len(RUNS)], *([value] if isinstance(names, str) else value))
        for index, value in enumerate(values)
    ]
    return pytest.mark.parametrize(("lightning", "schedule", *given), rows, indirect=["lightning"], ids=str)


def data(samples: int = 24, batch_size: int = 8) -> DataLoader[Any]:
    """Batches of inputs and labels, the same each time."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.arange(samples) % CLASSES), batch_size=batch_size)


def make(lightning: ModuleType, **attributes: Any) -> Any:
    """A classifier of four blocks that keeps what it logs; `attributes` are added to its class."""

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = self.build()

        def build(self) -> nn.Sequential:
            blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEVICES - 1)]
            return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layers(x)
            return made

        def loss(self, batch: Any) -> Tensor:
            inputs, labels = batch
            return functional.cross_entropy(self(inputs), labels)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return type("Net", (Net,), attributes)()


def strategy_of(lightning: ModuleType, schedule: str, micro_batches: Any = 4, **options: Any) -> Any:
    """The strategy with block i on device i."""
    pins = {f"layers.{index}": index for index in range(DEVICES)}
    defaults = {"micro_batches": micro_batches, "schedule": schedule, "pin": pins}
    return strategy_class((lightning.__name__,))(**{**defaults, **options})


@dataclass
class Fitted:
    """A fit: its `trainer`, the `model`, and the `losses` of each step, as callbacks see them."""

    trainer: Any
    model: Any
    losses: list[float]


def fit(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    model: Any,
    loaders: Sequence[Any],
    ckpt_path: Any = None,
    **options: Any,
) -> Fitted:
    """Fit and keep the losses of steps."""
    losses: list[float] = []

    class Losses(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, *rest: Any) -> None:
            for index in range(DEVICES if torch.simulated.is_available() else 0):  # pairs of devices have been tested
                torch.simulated.reset_peak_memory_stats(index)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            if outputs:  # else the step has skipped the batch
                losses.append(float(outputs["loss"]))

    made = trainer(**{**options, "callbacks": [*options.get("callbacks", []), Losses()]})
    made.fit(model, *loaders, ckpt_path=ckpt_path)
    return Fitted(made, model, losses)


def fit_alone(lightning: ModuleType, trainer: Callable[..., Any], *args: Any, **options: Any) -> Fitted:
    """Fit in plain Lightning on one device."""
    return fit(lightning, trainer, *args, **{**options, "accelerator": "cpu", "devices": 1, "strategy": "auto"})


def fit_split(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    model: Any,
    loaders: Sequence[Any],
    strategy: Any,
    reaches: float = 0.995,
    expected: int = 4,
    beside: int = 0,
    **options: Any,
) -> Fitted:
    """Fit in micro-batches: as many as asked for to the end, peaks as planned, and no thread left behind.

    Args:
        reaches: the least share of the planned peaks that is reached.
        expected: parts of a batch.
        beside: bytes on each device that callbacks hold and no plan knows of.
    """
    gc.collect()
    before = [torch.simulated.memory_allocated(index) for index in range(DEVICES)]
    with no_thread_left():
        fitted = fit(lightning, trainer, model, loaders, strategy=strategy, **options)
    plan = strategy.plan
    assert plan.micro_batches == expected
    peaks = [torch.simulated.max_memory_allocated(index) - before[index] for index in range(len(plan.devices))]
    for peak, planned, budget in zip(peaks, plan.peaks, plan.budgets, strict=True):
        assert reaches * planned <= peak <= 1.005 * planned + beside, (peaks, plan.peaks)
        assert peak <= budget
    return fitted


def compare(split: Fitted, alone: Fitted, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Weights, losses, metrics and counters are the same within re-ordered sums."""
    assert split.losses == pytest.approx(alone.losses, rel=rtol, abs=atol)
    assert split.trainer.global_step == alone.trainer.global_step
    assert split.trainer.current_epoch == alone.trainer.current_epoch
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(split.model.state_dict()[name].cpu(), value, rtol=rtol, atol=atol, msg=name)
    metrics = {name: float(value) for name, value in alone.trainer.callback_metrics.items()}
    found = {name: float(value) for name, value in split.trainer.callback_metrics.items()}
    assert found == pytest.approx(metrics, rel=rtol, abs=atol)
