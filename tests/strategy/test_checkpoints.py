"""Checkpoints are those of the plain model: they load under any strategy, on any devices, and in plain torch."""

from __future__ import annotations

import gc
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import CASES, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autobalance.strategy.checkpoints import host_state, to_host

pytestmark = pytest.mark.usefixtures("simulated")


def make(lightning: ModuleType, case: str = "residuals across blocks") -> Any:
    """With momentum: it has optimizer state, and does not blow up the rounding of gradients that are zero in theory."""
    momentum = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return CASES[case].make(lightning.LightningModule, momentum)


def batches(case: str = "residuals across blocks") -> DataLoader[Any]:
    return loader(CASES[case].batches(4))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance, msg=name)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


@pytest.mark.both_packages
def test_a_checkpoint_is_plain_and_equals_that_of_the_unsplit_model(
    lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path
) -> None:
    averaging = lightning.callbacks.StochasticWeightAveraging  # keeps a model on the device in its own state
    for name, options in (("split", {}), ("plain", {"accelerator": "cpu", "devices": 1, "strategy": "auto"})):
        made = trainer(max_epochs=2, callbacks=[averaging(1e-3, swa_epoch_start=1)], **options)
        save = lightning.callbacks.LambdaCallback(
            on_train_epoch_end=lambda trainer, module, name=name: trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        )
        made.callbacks.append(save)
        made.fit(make(lightning, "tied embedding"), batches("tied embedding"))
    split, plain = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("split", "plain"))
    assert split.keys() == plain.keys()
    found, expected = tensors_in(split), tensors_in(plain)
    assert len(found) == len(expected) > 20
    assert all(tensor.device.type == "cpu" and type(tensor) is Tensor for tensor in found)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert split["state_dict"]["embed.weight"].data_ptr() == split["state_dict"]["head.weight"].data_ptr()


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_training_resumes_on_any_number_of_devices(
    lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path, devices: int
) -> None:
    whole = make(lightning)
    straight = trainer(max_epochs=2)
    straight.fit(whole, batches())

    first = trainer()
    first.fit(make(lightning), batches())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = make(lightning)
    second = trainer(devices=devices, max_epochs=2)
    second.fit(resumed, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert len(set(second.strategy.plan.assignment)) == devices
    assert second.global_step == straight.global_step == 8
    assert_equal(weights(resumed), weights(whole), 1e-5)


def test_training_resumes_under_lightnings_own_strategy(
    lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path
) -> None:
    whole = make(lightning)
    trainer(max_epochs=2).fit(whole, batches())
    first = trainer()
    first.fit(make(lightning), batches())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = make(lightning)
    second = trainer(accelerator="cpu", devices=1, strategy="auto", max_epochs=2)
    second.fit(resumed, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert_equal(weights(resumed), weights(whole), 1e-5)


@pytest.mark.both_packages
def test_load_from_checkpoint_makes_a_model_on_the_host(
    lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Path
) -> None:
    class Net(lightning.LightningModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layers(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters())

    model = Net(8)
    made = trainer()
    made.fit(model, DataLoader(torch.randn(8, 8), batch_size=4))  # type: ignore[arg-type]
    made.save_checkpoint(tmp_path / "net.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "net.ckpt")
    assert all(parameter.device.type == "cpu" for parameter in loaded.parameters())
    assert_equal(weights(loaded), weights(model))


def test_nothing_stays_on_the_devices_after_a_run(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    gc.collect()
    before = [torch.simulated.memory_allocated(index) for index in range(4)]
    made, model = trainer(), make(lightning)
    made.fit(model, batches())
    del made, model
    gc.collect()
    assert [torch.simulated.memory_allocated(index) for index in range(4)] == before


def test_to_host_keeps_what_is_there_and_every_type() -> None:
    Pair = namedtuple("Pair", ["left", "right"])
    here, there = torch.ones(2), torch.ones(2, device="simulated:1")
    untouched = {"a": [here, 1], "b": "text"}
    assert to_host(untouched) is untouched
    moved = to_host(OrderedDict(pair=Pair(here, there), items=[there, (there, None)]))
    assert type(moved) is OrderedDict
    assert type(moved["pair"]) is Pair
    assert moved["pair"].left is here
    assert all(tensor.device.type == "cpu" for tensor in tensors_in(moved))


def test_tied_tensors_are_copied_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("simulated:0")
    model[1].weight = model[0].weight
    state = host_state(model, model.state_dict())
    assert state["0.weight"] is state["1.weight"]
    assert state["0.bias"] is not state["1.bias"]
    assert type(state) is OrderedDict
    assert state._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
