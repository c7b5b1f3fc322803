from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from autobalance.blocks import find_blocks
from autobalance.placement.place import loose_tensors, place


class Metric(nn.Module):
    """Keeps its state in a plain attribute, as metrics do, and moves it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(2)

    def _apply(self, fn, recurse: bool = True):
        self.total = fn(self.total)
        return super()._apply(fn, recurse)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.outside = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.metric = Metric()

    def self_balance(self) -> list[str]:
        return ["a", "b"]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def device(index: int) -> torch.device:
    return torch.device("simulated", index)


def placed(model: nn.Module, loose: Mapping[str, int] = {}) -> nn.Module:
    """`a` on device 1, `b` on device 2, the root device is 3."""
    places = {name: device(index) for name, index in loose.items()}
    place(model, find_blocks(model), [device(1), device(2)], places, device(3))
    return model


def where(model: nn.Module) -> dict[str, int]:
    return {name: tensor.device.index for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_blocks_go_to_their_devices_and_the_rest_to_the_root() -> None:
    model = placed(Model())
    found = where(model)
    assert {name: index for name, index in found.items() if name[0] in "ab"} == {
        "a.weight": 1,
        "a.bias": 1,
        **dict.fromkeys(["b.weight", "b.bias", "b.running_mean", "b.running_var", "b.num_batches_tracked"], 2),
    }
    assert {index for name, index in found.items() if name[0] not in "ab"} == {3}
    assert model.metric.total.device == device(3)


def test_what_is_loose_goes_to_its_user() -> None:
    found = where(placed(Model(), {"scale": 1, "outside.0.weight": 2, "outside.1": 0, "mask": 1}))
    assert (found["scale"], found["mask"]) == (1, 1)
    assert (found["outside.0.weight"], found["outside.0.bias"]) == (2, 3)
    assert (found["outside.1.weight"], found["outside.1.bias"]) == (0, 0)


def test_nothing_passes_through_a_device_that_is_not_its_own() -> None:
    model = Model()
    model.outside.append(nn.Linear(300, 300))
    torch.simulated.reset_peak_memory_stats(3)
    before = torch.simulated.memory_allocated(3)
    placed(model, {"outside": 0})
    assert torch.simulated.max_memory_allocated(3) - before < 300 * 300 * 4


def test_parameters_keep_their_identity_and_gradients() -> None:
    model = Model()
    model(torch.rand(4, 2)).sum().backward()
    model.scale.grad = torch.ones(2)
    before = list(model.parameters())
    placed(model, {"scale": 1})
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert model.scale.grad.device == device(1)
    assert model.a.weight.grad.device == device(1)


def test_a_buffer_stays_out_of_the_state_dict_if_it_was() -> None:
    model = placed(Model())
    assert "mask" not in model.state_dict()
    assert "mask" in dict(model.named_buffers())


def test_a_blocks_parameter_that_the_model_names_too_stays_in_its_block() -> None:
    model = Model()
    model.alias = model.a.weight
    placed(model)
    assert model.alias is model.a.weight
    assert model.a.weight.device == device(1)


def test_loose_tensors_that_are_tied_stay_tied() -> None:
    model = Model()
    model.outside[1].weight = model.outside[0].weight
    model.outside[0].register_buffer("shared", model.mask)
    placed(model, {"outside.0.weight": 0, "mask": 2})
    assert model.outside[1].weight is model.outside[0].weight
    assert model.outside[0].weight.device == device(0)
    assert model.outside[0].shared is model.mask
    assert model.mask.device == device(2)


def test_a_loose_recurrent_layer_is_moved_as_one() -> None:
    model = Model()
    model.rnn = nn.LSTM(2, 2)
    placed(model, {f"rnn.{name}": 1 for name, _ in model.rnn.named_parameters()})
    output, _ = model.rnn(torch.rand(1, 2, device="simulated:1"))
    assert output.device == device(1)


def test_loose_tensors_are_named_once_and_without_those_of_blocks() -> None:
    model = Model()
    model.alias = model.a.weight
    model.again = model.scale
    assert list(loose_tensors(model, find_blocks(model))) == [
        "scale",
        *[f"outside.{index}.{name}" for index in (0, 1) for name in ("weight", "bias")],
        "mask",
    ]


def test_an_optimizer_built_before_trains_what_is_placed() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    placed(model)
    model.a(torch.ones(1, 2, device="simulated:1")).sum().backward()
    before = model.a.bias.tolist()
    optimizer.step()
    assert model.a.bias.tolist() == pytest.approx([value - 1.0 for value in before])
