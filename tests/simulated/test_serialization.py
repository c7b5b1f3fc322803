"""What is written from simulated devices is plain: it loads anywhere, without autobalance."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autobalance.simulated import SimulatedTensor, fake_elements


def test_saved_state_loads_with_weights_only_and_without_autobalance(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to("simulated:1")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2, device="simulated:1")).square().sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "weight": model[0].weight}
    torch.save(state, tmp_path / "state.pt")
    code = (
        "import sys, torch\n"
        f"state = torch.load({str(tmp_path / 'state.pt')!r}, weights_only=True)\n"
        "tensors = [*state['model'].values(), *state['optimizer']['state'][0].values(), state['weight']]\n"
        "assert {type(t) for t in tensors} <= {torch.Tensor, torch.nn.Parameter}, tensors\n"
        "assert {t.device.type for t in tensors} == {'cpu'}\n"
        "assert type(state['weight']) is torch.nn.Parameter and state['weight'].requires_grad\n"
        "assert 'autobalance' not in sys.modules\n"
        "print(state['weight'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(model[0].weight.tolist())


def test_saved_state_comes_back_onto_a_device(tmp_path: Path) -> None:
    x = torch.arange(3.0, device="simulated:1")
    torch.save({"x": x, "view": x[1:], "parameter": nn.Parameter(x)}, tmp_path / "x.pt")
    before = torch.simulated.memory_allocated(2)
    for _ in range(2):
        state = torch.load(tmp_path / "x.pt", map_location="simulated:2", weights_only=True)
        assert {tensor.device for tensor in state.values()} == {torch.device("simulated:2")}
        assert (state["view"].tolist(), (state["parameter"] * 2).tolist()) == ([1.0, 2.0], [0.0, 2.0, 4.0])
        assert torch.simulated.memory_allocated(2) - before == 512
        torch.save(state, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True)["x"].device.type == "cpu"
    with pytest.raises(RuntimeError, match="there is no simulated:9"):
        torch.load(tmp_path / "x.pt", map_location="simulated:9", weights_only=True)


def test_ties_and_shared_storages_are_written_once(tmp_path: Path) -> None:
    weight = torch.zeros(256, 256, device="simulated:0")
    torch.save(OrderedDict(embed=weight, head=weight, rows=weight[:2], detached=weight.detach()), tmp_path / "tied.pt")
    assert (tmp_path / "tied.pt").stat().st_size < 1.1 * 256 * 256 * 4
    state = torch.load(tmp_path / "tied.pt", weights_only=True)
    state["embed"][0, 0] = 1.0
    assert {name: tensor[0, 0].item() for name, tensor in state.items()} == dict.fromkeys(state, 1.0)


def test_pickled_module_is_a_module_on_the_host() -> None:
    model = nn.Linear(2, 2).to("simulated:3")
    model.weight.note = "kept"
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin.weight) is nn.Parameter
    assert (twin.weight.device.type, twin.weight.note) == ("cpu", "kept")
    assert twin.weight.tolist() == model.weight.tolist()


def test_tensor_without_numbers_cannot_be_written() -> None:
    mode = FakeTensorMode()
    with fake_elements(mode), pytest.raises(RuntimeError, match="no numbers that could be written"):
        pickle.dumps(SimulatedTensor(mode.from_tensor(torch.ones(2)), 0))
