"""The world of a trial where CUDA is in use, tried on CPU tensors: its accounting knows no device type."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.blocks import find_blocks
from autobalance.kernels.target import Target
from autobalance.profiling import trace, watched_world
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.trial import Batch, PlainTrial
from autobalance.profiling.watched_world import WatchedWorld
from autobalance.profiling.world import Kind


class Net(nn.Module):
    """Three blocks and glue between them; sizes differ so that no two storages are mistaken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(128, 256), nn.Linear(256, 384), nn.Linear(384, 128)
        self.scale = nn.Parameter(torch.ones(384))

    def self_balance(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.b(torch.relu(self.a(x)))) * self.scale
        return self.c(hidden) + x


Step = Callable[[nn.Module, Tensor], Tensor]


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def profiler(model: nn.Module, step: Step = total, kind: Kind = "fake") -> Profiler:
    """Profiles a step on ones that are made on the root device: a batch from the host is nothing new to CPU devices."""
    trial = PlainTrial(
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False),
        lambda model, rows: step(model, torch.ones(rows, 128, device=trial._device)),
    )
    made = Profiler(model, find_blocks(model), trial, [Batch("train batch", "train", 64)])
    made._kind = kind
    return made


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials run in the watched world, on CPU tensors."""

    def make(kind: Kind, target: Target, devices: int, tracer: Any, note: Any, observe: Any) -> WatchedWorld:
        return WatchedWorld(kind, target, [torch.device("cpu")], tracer, note, observe)

    monkeypatch.setattr(trace, "make_world", make)


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_costs_are_those_of_the_simulated_world(kind: Kind, request: pytest.FixtureRequest) -> None:
    model = Net()
    expected = profiler(model).profile()
    request.getfixturevalue("watched")
    found = profiler(model, kind=kind).profile()
    for mine, theirs in zip(found.blocks, expected.blocks, strict=True):
        # `torch.ones` is one operation in one world and two in the other, which is all that times may differ by.
        assert mine.forward_time == pytest.approx(theirs.forward_time, rel=1e-2)
        assert mine.backward_time == theirs.backward_time
        assert replace(mine, forward_time=0, forward_work=()) == replace(theirs, forward_time=0, forward_work=())
    assert found.loose == expected.loose == (("scale", 1),)
    assert found.peak() == expected.peak()


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_forecast_of_a_placement_is_that_of_the_simulated_world(kind: Kind, request: pytest.FixtureRequest) -> None:
    model = Net()
    placement = (["a", "b", "c"], [1, 0, 1], {"scale": 0}, 1, 2)
    expected = [device.peak for device in profiler(model).forecast(*placement)]
    request.getfixturevalue("watched")
    assert [device.peak for device in profiler(model, kind=kind).forecast(*placement)] == expected


@pytest.mark.usefixtures("watched")
def test_a_branch_on_a_small_mask_is_taken_as_with_real_numbers() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        mask = torch.arange(4, device=x.device) > 2
        assert mask.any()
        assert mask.sum().item() == 1
        return total(model, x)

    made = profiler(Net(), step)
    made.profile()
    assert not any("only real data know" in note for note in made.notes)


@pytest.mark.usefixtures("watched")
def test_a_number_that_nobody_knows_is_a_noted_placeholder() -> None:
    made = profiler(Net(), lambda model, x: total(model, x) * total(model, x).item())
    made.profile()
    assert [note.partition(" (")[0] for note in made.notes if "only real data know" in note] == [
        "2 number(s) that only real data know"
    ]


@pytest.mark.usefixtures("watched")
def test_the_model_is_untouched() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profiler(model).profile()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_results_on_cuda_have_the_storages_that_its_kernels_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(target: Target) -> int:
        tracer = Tracer()
        world = WatchedWorld("fake", target, [torch.device("cpu")], tracer, lambda kind: None, lambda *told: None)
        with world:
            value = torch.empty(64, 32)
            losses = nn.functional.binary_cross_entropy(value, value)
            assert losses.shape == ()
        return tracer.nbytes[-1]

    # The CPU's fakes stand for those on CUDA, whose kernels are not to be chosen here.
    monkeypatch.setattr(watched_world, "emulating", lambda *targets: nullcontext())
    assert held(Target("cuda", "A100-80GB", (8, 0))) == held(Target("cpu", "cpu")) == 64 * 32 * 4


def test_sparse_gradients_are_refused_in_words() -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match=r"build .*sparse=False"):
        autobalance.profile(model, torch.zeros(4, dtype=torch.long), target="cpu")
