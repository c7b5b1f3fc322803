"""Models on meta are made block by block on their devices, from files or by their own initialisation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from autobalance import simulate
from autobalance.blocks import find_blocks
from autobalance.placement.materialize import is_on_meta, load_weights, materialize

WIDTH = 8


def there(*indices: int) -> list[torch.device]:
    return [torch.device("simulated", index) for index in indices]


class Net(nn.Module):
    """Four blocks of different kinds, and a loose parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(1))

    def self_balance(self) -> list[nn.Module]:
        return [self.embed, self.attention, self.lstm, self.head]

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    with simulate(4):
        yield


def on_meta(kind: type[nn.Module] = Net) -> Any:
    with torch.device("meta"):
        return kind()


def place(model: nn.Module) -> None:
    materialize(model, find_blocks(model), there(0, 1, 2, 2), {"scale": there(1)[0]}, there(3)[0])


def test_every_tensor_is_made_on_its_device() -> None:
    model = on_meta()
    place(model)
    assert not is_on_meta(model)
    where = {name: str(tensor.device) for name, tensor in model.state_dict().items()}
    assert where["embed.weight"] == "simulated:0"
    assert where["attention.in_proj_weight"] == where["scale"] == "simulated:1"
    assert where["lstm.weight_hh_l0"] == where["head.0.running_var"] == "simulated:2"


def test_modules_initialise_themselves_as_if_built_there() -> None:
    model = on_meta()
    torch.manual_seed(3)
    place(model)
    torch.manual_seed(3)
    expected = nn.Embedding(WIDTH, WIDTH)  # the first block: the same random numbers
    assert torch.equal(model.embed.weight.cpu(), expected.weight)
    assert model.scale.item() == 1.0
    assert model.head[0].running_var.cpu().tolist() == [1.0] * WIDTH
    assert 0 < model.lstm.weight_hh_l0.abs().max().item() <= WIDTH**-0.5


def test_a_recurrent_module_runs_after_it_was_made() -> None:
    model = on_meta()
    place(model)
    output, _ = model.lstm(torch.ones(2, 3, WIDTH, device="simulated:2"))
    assert output.shape == (2, 3, WIDTH)


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors"])
def test_files_are_read_block_by_block(tmp_path: Path, name: str) -> None:
    source = Net()
    path = tmp_path / name
    (save_file if name.endswith("safetensors") else torch.save)(source.state_dict(), path)  # type: ignore[operator]
    model = on_meta()
    load_weights(model, path)
    assert is_on_meta(model)
    place(model)
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key].cpu(), value), key


def test_a_part_of_a_model_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    source = nn.Embedding(WIDTH, WIDTH)
    torch.save(source.state_dict(), tmp_path / "embed.pt")
    model = on_meta()
    load_weights(model.embed, tmp_path / "embed.pt")
    place(model)
    assert torch.equal(model.embed.weight.cpu(), source.weight)
    assert model.head[0].weight.cpu().tolist() == [1.0] * WIDTH


def test_what_a_file_lacks_is_initialised_if_that_is_allowed(tmp_path: Path) -> None:
    state = Net().state_dict()
    del state["head.1.bias"], state["embed.weight"]
    torch.save({**state, "extra": torch.ones(1)}, tmp_path / "part.pt")
    model = on_meta()
    with pytest.raises(ValueError, match=r"it lacks 'embed.weight', 'head.1.bias' and has 'extra' besides"):
        load_weights(model, tmp_path / "part.pt")
    load_weights(model, tmp_path / "part.pt", strict=False)
    place(model)
    assert torch.equal(model.head[1].weight.cpu(), state["head.1.weight"])
    assert 0 < model.head[1].bias.abs().max().item() <= WIDTH**-0.5


def test_what_has_its_values_already_keeps_them() -> None:
    model = on_meta()
    model.head[1].bias = nn.Parameter(torch.full((WIDTH,), 7.0))
    place(model)
    assert model.head[1].bias.tolist() == [7.0] * WIDTH
    assert model.head[1].bias.device.type == "cpu"
    assert model.head[1].weight.device == there(2)[0]


def test_tied_parameters_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.b.weight = self.a.weight

        def self_balance(self) -> list[nn.Module]:
            return [self.a, self.b]

    model = on_meta(Tied)
    materialize(model, find_blocks(model), there(0, 0), {}, there(3)[0])
    assert model.a.weight is model.b.weight
    assert isinstance(model.a.weight, nn.Parameter)


def test_a_tensor_that_nobody_can_make_is_named() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("frequencies", torch.ones(WIDTH), persistent=False)

        def self_balance(self) -> list[nn.Module]:
            return [self.layer]

    model = on_meta(Rotary)
    with pytest.raises(
        ValueError, match=r"'frequencies' of Rotary is on meta, in no file of weights, and its module has"
    ):
        materialize(model, find_blocks(model), there(0), {}, there(3)[0])
    assert is_on_meta(model.layer)


def test_a_model_with_weights_is_left_alone() -> None:
    model = Net()
    before: dict[str, Tensor] = dict(model.named_parameters())
    place(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with pytest.raises(ValueError, match=r"Net has its weights already: build it inside `with torch.device\('meta'\)`"):
        load_weights(model, "nowhere.pt")
