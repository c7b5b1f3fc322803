"""Blocks whose saved tensors are on the host between forward and backward: same numbers, and nothing rests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.execution.savings.offload import OnHostUntilBackward
from autobalance.execution.savings.saved_tensors import Part, SavedTensors
from autobalance.partitioning.replay import replay
from autobalance.placement.hooks import Door
from autobalance.placement.locate import DeviceLocator
from autobalance.simulated import simulate
from autobalance.timelines.recompute import with_savings
from tests.execution.saving_runs import Case, adamw, case_of, chain

FIRST = "simulated:0"


@pytest.fixture(autouse=True)
def simulated_devices() -> Iterator[None]:
    with simulate(2):
        yield


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt", "bf16-mixed"),
        ("batch norm convnet", "32-true"),
        ("lstm", "32-true"),
        ("skip in glue", "32-true"),
        ("tied embedding", "bf16-mixed"),
    ],
)
def test_training_is_the_same_and_peaks_are_those_of_the_forecast(name: str, precision: str) -> None:
    case = case_of(name, precision=precision)
    plain = case.plan()
    plan = replace(plain, saving=("offload",) * len(plain.blocks))
    ran = case.run(plan)
    ran.assert_same(case.run(plain))
    assert ran.peaks == case.forecast(plan)


def test_memory_is_what_the_planner_said() -> None:
    case = case_of("batch norm convnet", optimizer=adamw)
    plain = case.plan()
    plan = replace(plain, saving=("offload",) * len(plain.blocks))
    assert plain.profile is not None
    timeline = with_savings(plain.profile.timeline, plan.saving)
    ran = case.run(plan)
    assert ran.peaks == replay(timeline, plan.assignment, plan.root, 2)
    assert ran.peaks[0] < case.run(plain).peaks[0]


def offloading(case: Case, words: tuple[str, str] = ("offload", "offload")) -> nn.Module:
    plan = replace(case.plan(), saving=words, assignment=(0, 0), root=0)
    return autobalance.dispatch(case.make(), plan)


def held() -> int:
    gc.collect()
    used: int = torch.simulated.memory_allocated(0)
    return used


def test_nothing_rests_between_forward_and_backward() -> None:
    case = chain()
    model = offloading(case)
    before = held()
    loss = case.loss(model, case.batches[0])
    assert held() - before == 512 + 512  # the loss; its mean saves what was squared, which is glue of this test
    loss.backward()
    del loss
    gradients = sum(512 * -(-parameter.nbytes // 512) for parameter in model.parameters())
    assert held() - before == gradients


def test_a_graph_that_is_dropped_leaves_nothing_behind() -> None:
    case = chain()
    model = offloading(case)
    before = held()
    loss = case.loss(model, case.batches[0])
    del loss
    assert held() == before


def test_batches_in_flight_keep_apart_what_they_save() -> None:
    found = []
    for words in (("keep", "keep"), ("offload", "offload")):
        case = chain()
        model = offloading(case, words)
        losses = [case.loss(model, batch) for batch in case.batches]
        for index in (1, 2, 0):
            losses[index].backward()
        found.append([parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_a_backward_through_the_same_graph_again_is_the_same() -> None:
    case = chain()
    model = offloading(case)
    loss = case.loss(model, case.batches[0])
    loss.backward(retain_graph=True)
    once = [parameter.grad.cpu().clone() for parameter in model.parameters() if parameter.grad is not None]
    loss.backward()
    twice = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(2 * mine, theirs) for mine, theirs in zip(once, twice, strict=True))


class ChangesWhatItSaved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        return y


@pytest.mark.parametrize("word", ["keep", "offload"])
def test_a_saved_tensor_that_is_changed_in_place_is_refused_as_ever(word: str) -> None:
    case, other = chain(b=nn.Tanh), chain(b=ChangesWhatItSaved)  # which has no backward that could be planned
    plan = replace(case.plan(), saving=("keep", word), assignment=(0, 0), root=0)
    loss = case.loss(autobalance.dispatch(other.make(), plan), case.batches[0])
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        loss.backward()


def saved_by_hand(**options: Any) -> SavedTensors:
    device = torch.device(FIRST)
    door = Door("block", device, DeviceLocator([device]))
    return SavedTensors(door, device, rest_of=partial(OnHostUntilBackward, device), **options)


def test_views_of_one_storage_go_and_come_back_once() -> None:
    saved = saved_by_hand()
    numbers = torch.arange(12.0).to(FIRST)
    views = [numbers[2:8].view(2, 3), numbers.view(3, 4).t(), numbers.view(torch.int32)]
    expected = [view.cpu() for view in views]
    parts = [saved.pack(view) for view in views]
    assert all(isinstance(part, Part) for part in parts)
    assert len({id(part.rest) for part in parts if isinstance(part, Part)}) == 1
    before = held()
    del numbers, views
    assert before - held() == 512
    back = [saved.unpack(part) for part in parts]
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(back, expected, strict=True))
    assert [part.stride() for part in back] == [part.stride() for part in expected]
    assert before == held()


def test_what_others_hold_on_the_device_is_not_brought_there_again() -> None:
    saved = saved_by_hand()
    numbers = torch.arange(12.0).to(FIRST)
    part, before = saved.pack(numbers), held()
    back = saved.unpack(part)
    assert held() == before
    assert back.data_ptr() == numbers.data_ptr()


def test_weights_and_what_is_elsewhere_stay() -> None:
    saved = saved_by_hand()
    weight = nn.Parameter(torch.ones(2, 3, device=FIRST))
    for tensor in (weight, weight.t(), torch.ones(2), torch.ones(2, device="simulated:1")):
        assert isinstance(saved.pack(tensor), Tensor)
