"""Batches stay whole, are split, or flow as a window, as the run allows and as it gains time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autobalance
from autobalance.devices.device import Device
from autobalance.strategy.registration import strategy_class

WIDTH = 16


@pytest.fixture(autouse=True)
def slow() -> Iterator[None]:
    """Four devices on which a layer takes far longer than its launch, so that overlapping gains time."""
    with autobalance.simulate([Device(f"slow {index}", 2**30, flops=1e6, bandwidth=1e12) for index in range(4)]):
        yield


def make(lightning: ModuleType, normalises: bool = False) -> Any:
    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
            if normalises:
                self.layers[1] = nn.BatchNorm1d(WIDTH)

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.layers(batch[0]).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Net()


def data(samples: int, batch_size: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(samples, WIDTH, generator=generator)), batch_size=batch_size)


def test_a_batch_is_split_where_that_makes_the_step_shorter(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    made = trainer()
    made.fit(make(lightning), data(16, 8))
    plan = made.strategy.plan
    assert plan.schedule in ("gpipe", "1f1b")
    assert plan.micro_batches > 1
    assert not plan.accumulated
    whole = trainer(strategy=strategy_class((lightning.__name__,))(schedule="naive"))
    whole.fit(make(lightning), data(16, 8))
    assert plan.step_time < whole.strategy.plan.step_time / 2


def test_batches_too_small_to_be_split_flow_as_a_window_and_train_as_one_after_the_other(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    def trained(**options: Any) -> tuple[Any, Any]:
        made, model = trainer(accumulate_grad_batches=4, max_epochs=2, **options), make(lightning)
        made.fit(model, data(6, 1))  # windows of four batches and of two
        return made, model.cpu().state_dict()

    made, weights = trained()
    plan = made.strategy.plan
    assert (plan.accumulated, plan.micro_batches) == (True, 4)
    plain, expected = trained(strategy="auto", accelerator="cpu", devices=1)
    assert made.global_step == plain.global_step == 4
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value)
    metrics = {name: float(value) for name, value in plain.callback_metrics.items()}
    assert {name: float(value) for name, value in made.callback_metrics.items()} == pytest.approx(metrics)


def test_batches_that_a_hook_cannot_split_for_all_devices_flow_as_a_window(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    def split_batch(batch: Any, count: int) -> list[Any]:
        if count > 2:
            raise ValueError("only halves")
        return [[part] for part in batch[0].chunk(count)]

    made, model = trainer(accumulate_grad_batches=4), make(lightning)
    model.split_batch = split_batch
    made.fit(model, data(16, 4))
    assert (made.strategy.plan.accumulated, made.strategy.plan.micro_batches) == (True, 4)


def test_a_window_that_nothing_accumulates_is_said_to_be_none(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    made = trainer(strategy=strategy_class((lightning.__name__,))(micro_batches="accumulate"))
    made.fit(make(lightning), data(16, 8))
    assert made.strategy.plan.schedule == "naive"
    (told,) = [message for message in messages if "micro-batches" in message]
    assert "takes the batches that `accumulate_grad_batches` adds up, but it is 1" in told


@pytest.mark.both_packages
def test_a_batch_that_must_not_be_split_stays_whole_and_the_log_says_why(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    made = trainer()
    made.fit(make(lightning, normalises=True), data(16, 8))
    assert (made.strategy.plan.schedule, made.strategy.plan.micro_batches) == ("naive", 1)
    (told,) = [message for message in messages if "micro-batches" in message]
    assert "`layers.1` (BatchNorm1d) normalises over the batch" in told


def test_a_batch_whose_samples_are_not_known_stays_whole_even_if_parts_are_asked_for(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    made = trainer(strategy=strategy_class((lightning.__name__,))(micro_batches=4))
    odd = DataLoader([(torch.ones(8, WIDTH), torch.ones(3))], batch_size=None)  # type: ignore[arg-type, var-annotated]
    made.fit(make(lightning), odd)
    assert made.strategy.plan.schedule == "naive"
    assert sum("micro-batches" in message for message in messages) == 1
