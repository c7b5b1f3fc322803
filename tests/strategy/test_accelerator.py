"""The simulated accelerator: how devices are chosen, what is refused, and what Lightning's own strategies get."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from models import CASES, loader

import autobalance
from autobalance.simulated import backend

pytestmark = pytest.mark.both_packages


def names(devices: Any) -> list[str]:
    return [str(device) for device in devices]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("devices", "expected"),
    [(2, [0, 1]), ("3", [0, 1, 2]), ("auto", [0, 1, 2, 3]), (-1, [0, 1, 2, 3]), ([1, 3], [1, 3]), ("0,2", [0, 2])],
)
def test_devices_are_chosen_as_for_gpus(trainer: Callable[..., Any], devices: Any, expected: list[int]) -> None:
    made = trainer(devices=devices)
    assert names(made.strategy.parallel_devices) == [f"simulated:{index}" for index in expected]
    assert made.num_devices == len(expected)
    assert (made.world_size, made.strategy.root_device.index) == (1, expected[-1])


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("devices", [5, [0, 4]])
def test_a_device_that_is_not_configured_is_refused(trainer: Callable[..., Any], devices: Any) -> None:
    with pytest.raises(ValueError, match="asks for device 4, but 4 simulated devices are configured, numbered from 0"):
        trainer(devices=devices)


@pytest.fixture
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("AUTOBALANCE_SIMULATE", raising=False)
    with autobalance.simulate(1):
        backend.set_count(0)
        yield


@pytest.mark.usefixtures("nothing_configured")
def test_without_configuration_a_number_means_devices_without_a_limit(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    model = CASES["residuals across blocks"].make(lightning.LightningModule)
    made = trainer(devices=2)
    made.fit(model, loader(CASES["residuals across blocks"].batches(1)))
    assert "Running on 2 simulated devices without a memory limit: real numbers, computed on the CPU." in messages


@pytest.mark.usefixtures("nothing_configured")
def test_without_configuration_auto_says_how_to_configure(trainer: Callable[..., Any]) -> None:
    with pytest.raises(
        ValueError, match=r"simulate\('4x96MiB'\) before the Trainer, or the environment variable AUTOB"
    ):
        trainer(devices="auto")


@pytest.mark.usefixtures("nothing_configured")
def test_the_environment_configures(trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBALANCE_SIMULATE", "2x1MiB,1MiB")
    assert len(trainer(devices="auto").strategy.parallel_devices) == 3


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_spawn"])
def test_several_devices_without_our_strategy_are_refused(trainer: Callable[..., Any], strategy: str) -> None:
    with pytest.raises(ValueError, match=r"would start 2 processes.* Use strategy='self_balance', or devices=1"):
        trainer(devices=2, strategy=strategy)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("by_instance", [False, True])
def test_lightnings_own_strategy_uses_the_one_device(
    lightning: ModuleType, trainer: Callable[..., Any], by_instance: bool
) -> None:
    strategy = lightning.strategies.SingleDeviceStrategy() if by_instance else "auto"
    made = trainer(devices=[2], strategy=strategy)
    model = CASES["gpt"].make(lightning.LightningModule)
    torch.simulated.reset_peak_memory_stats(2)
    before = torch.simulated.max_memory_allocated(2)
    made.fit(model, loader(CASES["gpt"].batches(1)))
    assert str(made.strategy.root_device) == "simulated:2"
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert torch.simulated.max_memory_allocated(2) - before > 2 * weights


@pytest.mark.usefixtures("simulated")
def test_mixed_precision_given_as_a_plugin_is_told_its_device(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    plugin = lightning.plugins.MixedPrecision("bf16-mixed", device="cuda")
    assert trainer(plugins=[plugin]).precision_plugin is plugin
    assert plugin.device == "simulated"


def test_devices_of_the_cpu_are_left_alone(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    made = trainer(accelerator="cpu", devices=1, strategy="auto", precision="bf16-mixed")
    assert made.precision_plugin.device == "cpu"
    assert str(made.strategy.root_device) == "cpu"


@pytest.mark.usefixtures("simulated")
def test_device_statistics(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    accelerator = trainer().accelerator
    held = torch.ones(1000, device="simulated:1")
    stats = accelerator.get_device_stats(torch.device("simulated", 1))
    assert stats["allocated_bytes.current"] >= held.numel() * 4
    assert stats["allocated_bytes.peak"] >= stats["allocated_bytes.current"]
