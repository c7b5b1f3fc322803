"""No profiler leaves a trace: training goes on bit by bit as if nobody had profiled, and no byte stays allocated."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import autobalance
from autobalance.blocks import find_blocks
from autobalance.measuring.measure import measure
from autobalance.profiling.trial import Batch, PlainTrial

WIDTH, SIZE = 8, 32


class Noisy(Dataset[Tensor]):
    """Draws from every generator that a dataset may use."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH) + float(np.random.rand()) + random.random()


class Net(nn.Module):
    """Dropout, batch norm, spectral norm, a generator of its own, a counter, and a list of what it has seen."""

    def __init__(self, selects: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.utils.spectral_norm(nn.Linear(16, 16))
        )
        self.second = Selecting() if selects else nn.Linear(16, 16)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 1))
        self.generator = torch.Generator().manual_seed(11)
        self.steps = 0
        self.seen: list[float] = []

    def self_balance(self) -> list[nn.Module]:
        return [self.first, self.second, self.head]

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        noise = torch.rand(x.shape[0], 16, generator=self.generator).to(x.device)
        x = self.second(F.relu(self.first(x)) + noise)
        return self.head(F.dropout(x, 0.2, self.training)).pow(2).mean()


class Selecting(nn.Module):
    """Its shapes depend on numbers, so that it is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.1, self.training)
        return x * x[x > 0].mean()


def step(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def traced(target: str) -> Callable[[Net, Tensor], None]:
    def run(model: Net, batch: Tensor) -> None:
        autobalance.profile(model, batch, optimizer=torch.optim.AdamW, step=step, target=target)

    return run


def measured(device: str) -> Callable[[Net, Tensor], None]:
    def run(model: Net, batch: Tensor) -> None:
        trial = PlainTrial(torch.optim.AdamW, step)
        measure(model, Batch("train batch", "train", batch), find_blocks(model), trial, device)

    return run


PROFILERS = {
    "traced": traced("simulated"),
    "traced for the CPU": traced("cpu"),
    "traced for a GPU that is not there": traced("A100-80GB"),
    "measured": measured("simulated:0"),
    "measured on the CPU": measured("cpu"),
}


def loader_of(kind: str) -> DataLoader[Tensor]:
    options: dict[str, Any] = {
        "shuffled": {},
        "own generator": {"generator": torch.Generator().manual_seed(5)},
        "persistent workers": {
            "generator": torch.Generator().manual_seed(5),
            "num_workers": 1,
            "persistent_workers": True,
        },
    }[kind]
    return DataLoader(Noisy(), batch_size=8, shuffle=True, **options)


def train(kind: str, selects: bool, profiler: Callable[[Net, Tensor], None] | None) -> dict[str, Any]:
    """Two epochs; the profiler runs before the first batch and amid each epoch, between backward and step."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = Net(selects)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = loader_of(kind)
    seen: list[Tensor] = []
    if profiler is not None:
        profiler(model, torch.ones(8, WIDTH))
    for _ in range(2):
        for index, batch in enumerate(loader):
            seen.append(batch)
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            if profiler is not None and index == 1:
                profiler(model, batch)
            optimizer.step()
            model.seen.append(loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = [torch.rand(1).item(), random.random(), np.random.rand(), torch.rand(1, generator=model.generator).item()]
    return {"batches": seen, "state": state, "losses": model.seen, "steps": model.steps, "drawn": drawn}


@pytest.mark.parametrize("profiler", PROFILERS)
@pytest.mark.parametrize("kind", ["shuffled", "own generator"])
def test_training_is_bit_by_bit_that_without_profiling(kind: str, profiler: str) -> None:
    assert_equal(train(kind, False, PROFILERS[profiler]), train(kind, False, None))


@pytest.mark.parametrize("profiler", ["traced", "measured"])
def test_persistent_workers_do_not_notice(profiler: str) -> None:
    assert_equal(train("persistent workers", False, PROFILERS[profiler]), train("persistent workers", False, None))


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_block_that_has_to_run_for_real_leaves_nothing_either(profiler: str) -> None:
    assert_equal(train("shuffled", True, PROFILERS[profiler]), train("shuffled", True, None))


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (found["losses"], found["steps"], found["drawn"]) == (
        expected["losses"],
        expected["steps"],
        expected["drawn"],
    )
    assert len(found["batches"]) == len(expected["batches"]) == 2 * SIZE // 8
    assert all(torch.equal(one, other) for one, other in zip(found["batches"], expected["batches"], strict=True))
    assert all(torch.equal(value, expected["state"][name]) for name, value in found["state"].items())


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("profiler", ["traced", "measured"])
def test_allocated_bytes_are_five_times_what_they_were(profiler: str, selects: bool) -> None:
    model = Net(selects)
    held = torch.ones(1000, device="simulated:0")
    found = []
    for _ in range(5):
        gc.collect()
        before = [torch.simulated.memory_allocated(index) for index in range(4)]
        PROFILERS[profiler](model, torch.ones(8, WIDTH))
        gc.collect()
        found.append([torch.simulated.memory_allocated(index) for index in range(4)] == before)
    assert found == [True] * 5
    assert held.sum() == 1000


@pytest.mark.parametrize("profiler", PROFILERS)
def test_gradients_modes_hooks_and_buffers_are_what_they_were(profiler: str) -> None:
    model = Net()
    model(torch.ones(8, WIDTH)).backward()
    model.first[1].eval()
    gradients = [None if p.grad is None else (p.grad, p.grad.clone()) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    attributes = [{key: id(value) for key, value in vars(module).items()} for module in model.modules()]
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    PROFILERS[profiler](model, torch.ones(8, WIDTH))
    for parameter, before in zip(model.parameters(), gradients, strict=True):
        assert before is not None
        assert parameter.grad is before[0]
        assert torch.equal(parameter.grad, before[1])
    assert [module.training for module in model.modules()] == modes
    assert [{key: id(value) for key, value in vars(module).items()} for module in model.modules()] == attributes
    assert [tensor._version for tensor in (*model.parameters(), *model.buffers())] == versions
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_what_is_imported_for_a_profile_draws_no_random_number() -> None:
    program = (
        "import random, torch, autobalance\n"
        "state = random.getstate()\n"
        "autobalance.profile(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.ones(1, 2))\n"
        "assert random.getstate() == state\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
