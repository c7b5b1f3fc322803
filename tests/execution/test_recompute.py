"""Blocks that run their forward again in the backward: the same numbers, the planned memory, nothing done twice."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autobalance
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.replay import replay
from autobalance.simulated import simulate
from autobalance.timelines.recompute import savable, with_savings
from tests.execution.saving_runs import WIDTH, Case, Chain, Checkpointing, adamw, case_of, chain, loss_of


@pytest.fixture(autouse=True)
def simulated_devices() -> Iterator[None]:
    with simulate(2):
        yield


def recomputing(plan: Plan, saving: str = "recompute") -> Plan:
    return replace(plan, saving=(saving,) * len(plan.blocks))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt", "bf16-mixed"),
        ("batch norm convnet", "32-true"),
        ("lstm", "32-true"),
        ("called twice", "bf16-mixed"),
        ("tied embedding", "32-true"),
    ],
)
def test_training_is_the_same_and_peaks_are_those_of_the_forecast(name: str, precision: str) -> None:
    case = case_of(name, precision=precision)
    plain = case.plan()
    ran, expected = case.run(recomputing(plain)), case.run(plain)
    ran.assert_same(expected)
    assert ran.peaks == case.forecast(recomputing(plain))


def test_memory_is_what_the_planner_said() -> None:
    case = case_of("batch norm convnet", optimizer=adamw)
    plain = case.plan()
    plan, kept = recomputing(plain), case.run(plain)
    assert plain.profile is not None
    timeline = with_savings(plain.profile.timeline, plan.saving)
    ran = case.run(plan)
    assert ran.peaks == replay(timeline, plan.assignment, plan.root, 2)
    assert ran.peaks[0] < kept.peaks[0]


def assert_same_when_recomputed(case: Case) -> None:
    plain = case.plan()
    ran, expected = case.run(recomputing(plain)), case.run(plain)
    ran.assert_same(expected)
    assert ran.peaks == case.forecast(recomputing(plain))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(F.dropout(x, 0.3)).tanh(), 0.5) + torch.rand(WIDTH, device=x.device)


def test_random_numbers_are_drawn_again_as_they_were() -> None:
    assert_same_when_recomputed(chain(Dropping, Dropping))


class InContainers(nn.Module):
    """Is given, and gives back, containers; pops from the list that it is given and adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any, *, scale: float = 1.0) -> Any:
        values = given["values"]
        x = values.pop()
        y = torch.tanh(self.linear(x)) * scale
        values.append(y)
        values.append(torch.sin(y))
        return {"values": values, "sum": (y.sum(), None)}


class OfContainers(Chain):
    def forward(self, x: Any) -> Any:
        made = self.b(self.a({"values": [x]}, scale=2.0), scale=0.5)
        return sum(value.sum() for value in made["values"]) + made["sum"][0]


def test_containers_are_those_that_the_first_forward_was_given() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return OfContainers(InContainers(), InContainers())

    assert_same_when_recomputed(Case(make, [torch.ones(4, WIDTH)] * 2, loss_of))


def test_checkpoints_of_the_user_inside_a_block_work() -> None:
    assert_same_when_recomputed(chain(Checkpointing, Checkpointing))


def dispatched(model: nn.Module, case: Case, saving: str = "recompute") -> nn.Module:
    return autobalance.dispatch(model, recomputing(case.plan(), saving))


def test_hooks_of_a_block_fire_once() -> None:
    case = chain()
    model = dispatched(case.make(), case)
    fired: list[str] = []
    model.a.register_forward_hook(lambda *_: fired.append("forward"))
    model.a.register_full_backward_hook(lambda *_: fired.append("backward"))
    case.loss(model, case.batches[0].requires_grad_()).backward()
    assert fired == ["forward", "backward"]


def test_nothing_runs_twice_without_gradients() -> None:
    case = chain()
    model = dispatched(case.make(), case)
    calls: list[str] = []
    model.a[0].register_forward_hook(lambda *_: calls.append("inside"))
    with torch.no_grad():
        model(case.batches[0])
    assert calls == ["inside"]
    case.loss(model, case.batches[0]).backward()
    assert calls == ["inside"] * 3


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x))


def test_a_buffer_that_would_be_changed_twice_is_refused_by_name() -> None:
    case = chain(Counting)
    model = autobalance.dispatch(case.make(), replace(case.plan(), saving=("recompute", "keep")))
    with pytest.raises(RuntimeError, match=r"block 'a' changes its buffer 'calls' in its forward.*recompute=False"):
        model(case.batches[0])


def test_no_plan_lets_such_a_block_run_again() -> None:
    case = chain(Counting)
    profile = case.plan().profile
    assert profile is not None
    assert savable(profile.timeline) == {1}


def test_an_input_that_is_changed_in_place_before_the_backward_is_refused_as_ever() -> None:
    case = chain()
    plan = replace(recomputing(case.plan()), assignment=(0, 0), root=0)
    model = autobalance.dispatch(case.make(), plan)
    x = torch.ones(4, WIDTH, device="simulated:0")
    loss = case.loss(model, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_that_recomputes_can_be_copied_and_pickled() -> None:
    case = chain()
    model = dispatched(case.make(), case)
    expected = case.loss(model, case.batches[0])
    read = pickle.loads(pickle.dumps(model))  # tensors of simulated devices are read on the host
    for other in (copy.deepcopy(model), dispatched(read, case)):
        loss = case.loss(other, case.batches[0])
        loss.backward()
        assert float(loss) == float(expected)
        assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_gradients_are_those_of_the_plain_model() -> None:
    found = []
    for saving in ("keep", "recompute", "offload"):
        case = chain()
        model = dispatched(case.make(), case, saving)
        x = torch.ones(4, WIDTH, device="simulated:0", requires_grad=True)
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        first.square().sum().backward()
        found.append([parameter.grad.cpu() for parameter in model.a.parameters() if parameter.grad is not None])
    for others in found[1:]:
        assert len(others) == len(found[0]) > 0
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, found[0], strict=True))
