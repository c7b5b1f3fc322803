"""A split model learns what the unsplit one learns: same losses, same weights, however its blocks are called."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from models import CASES, adamw, loader, sgd
from torch import Tensor

STEPS = 5
Run = tuple[list[float], dict[str, Tensor], set[str]]
# What one device learns does not depend on the package that trains it: each of them runs once.
ON_ONE: dict[tuple[str, str, str], Run] = {}


def run(
    lightning: ModuleType, trainer: Callable[..., Any], case: str, optimizer: Callable[[Any], Any], **options: Any
) -> Run:
    """Losses of each step, the weights after the last, and where they were meanwhile."""
    losses: list[float] = []
    devices: set[str] = set()

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            losses.append(float(outputs["loss"]))
            devices.update(str(parameter.device) for parameter in module.parameters())

    model = CASES[case].make(lightning.LightningModule, optimizer)
    trainer(callbacks=[Losses()], **options).fit(model, loader(CASES[case].batches(STEPS)))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    return losses, {name: value.double() for name, value in model.state_dict().items()}, devices


def relative_distance(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    difference = sum((weights[name] - others[name]).square().sum() for name in weights)
    total = sum(others[name].square().sum() for name in weights)
    return float((difference / total) ** 0.5)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("optimizer", "tolerance"), [(sgd, 1e-6), (adamw, 1e-4)])
def test_four_devices_train_as_one_device_and_as_the_cpu(
    lightning: ModuleType, trainer: Callable[..., Any], case: str, optimizer: Callable[[Any], Any], tolerance: float
) -> None:
    losses, weights, devices = run(lightning, trainer, case, optimizer)
    assert len(losses) == STEPS
    assert len(devices) >= 3
    for accelerator in ("cpu", "simulated"):
        key = case, optimizer.__name__, accelerator
        if key not in ON_ONE:
            options = {"accelerator": accelerator, "devices": 1, "strategy": "auto"}
            ON_ONE[key] = run(lightning, trainer, case, optimizer, **options)
        expected, expected_weights, _ = ON_ONE[key]
        assert losses == pytest.approx(expected, rel=0, abs=1e-6)
        assert relative_distance(weights, expected_weights) < tolerance
