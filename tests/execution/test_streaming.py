"""Blocks whose weights are in host memory: the same training, and on the device only what runs and what is next."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.blocks import Blocks
from autobalance.execution.running import Running
from autobalance.execution.savings.savings import homes_of, refuse_shared_weights
from autobalance.partitioning.judge import judge
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.transfers import crossings_of
from autobalance.simulated import simulate
from tests.execution.saving_runs import WIDTH, Case, Checkpointing, adamw, case_of, chain, loss_of


@pytest.fixture(autouse=True)
def simulated_devices() -> Iterator[None]:
    with simulate(2):
        yield


def streaming(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, streamed=tuple(range(len(plan.blocks))), host_optimizer=(0, 1), **changes)


@pytest.mark.parametrize(
    ("name", "precision", "saving"),
    [
        ("gpt", "bf16-mixed", "keep"),
        ("gpt", "32-true", "recompute"),
        ("batch norm convnet", "bf16-mixed", "offload"),
        ("batch norm convnet", "32-true", "recompute"),
        ("lstm", "32-true", "keep"),
        ("called twice", "32-true", "offload"),
    ],
)
def test_training_is_the_same_and_peaks_are_those_of_the_forecast(name: str, precision: str, saving: str) -> None:
    case = case_of(name, precision=precision, optimizer=adamw)
    plain = case.plan()
    plan = streaming(plain, saving=(saving,) * len(plain.blocks))
    ran = case.run(plan)
    ran.assert_same(case.run(plain))
    assert ran.peaks == case.forecast(plan)
    assert plain.profile is not None
    given = plain.profile, plan.assignment, plan.root, plan.devices, crossings_of(plain.profile)
    planned = judge(*given, saving=plan.saving, streamed=plan.streamed, host_optimizer=plan.host_optimizer).peaks
    assert all(peak <= most for peak, most in zip(ran.peaks, planned, strict=True))


def test_weights_under_autocast_that_are_used_over_and_over_differ_by_the_order_of_sums_only() -> None:
    case = case_of("lstm", precision="bf16-mixed")  # whose casts autocast keeps, and adds up the gradients of these
    plain = case.plan()
    assert case.run(streaming(plain)).losses == pytest.approx(case.run(plain).losses, abs=2e-3)


def dispatched(case: Case, **changes: Any) -> nn.Module:
    plan = replace(case.plan(), assignment=(0, 0), root=0, streamed=(0, 1), host_optimizer=(0,), **changes)
    return autobalance.dispatch(case.make(), plan)


def held() -> int:
    gc.collect()
    used: int = torch.simulated.memory_allocated(0)
    return used


def test_parameters_gradients_and_checkpoints_are_those_of_a_plain_model_on_the_host() -> None:
    case = chain()
    plain, model = case.make(), dispatched(case)
    assert held() == 0
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    case.loss(model, case.batches[0]).backward()
    assert all(parameter.grad is not None and parameter.grad.device.type == "cpu" for parameter in parameters)
    optimizer.step()
    assert held() == 0
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(case.make().state_dict())
    assert torch.equal(model.a[0][0].weight, case.make().a[0][0].weight)


class Looks(nn.Module):
    """Notes what is on the device while it runs."""

    seen: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.simulated.memory_allocated(0) - 512)  # but for what it is given
        return self.linear(x)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Looks(), Looks(), Looks()

    def self_balance(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x)
        return self.c(x)

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self(x).sum()
        return loss


def test_the_weights_of_the_next_block_are_on_their_way_while_one_runs() -> None:
    case = Case(Three, [torch.ones(8, WIDTH)], loss_of)
    plan = replace(case.plan(), assignment=(0, 0, 0), root=0, streamed=(0, 1, 2), host_optimizer=(0,))
    model = autobalance.dispatch(case.make(), plan)
    for part in (model.a, model.b, model.c):
        part.seen.clear()
    with torch.no_grad():
        model(case.batches[0])
    weights = WIDTH * WIDTH * 4
    # The batch is dropped by nobody; the last block has no next one.
    assert model.a.seen == [2 * weights]
    assert model.c.seen[0] <= weights + 512
    assert held() == 0


@pytest.mark.parametrize("saving", ["keep", "offload", "recompute"])
def test_checkpoints_of_the_user_inside_a_block_work(saving: str) -> None:
    case = chain(Checkpointing, Checkpointing)
    plain = case.plan()
    plan = streaming(plain, saving=(saving,) * 2)
    ran = case.run(plan)
    ran.assert_same(case.run(plain))
    assert ran.peaks == case.forecast(plan)


def test_gradients_of_several_batches_add_up_on_the_host() -> None:
    found = []
    for changes in ({}, {"saving": ("offload", "offload")}, None):
        case = chain()
        model = case.make() if changes is None else dispatched(case, **changes)
        losses = [case.loss(model, batch) for batch in case.batches]
        for index in (2, 0, 1):
            losses[index].backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for others in found[:2]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, found[2], strict=True))


def test_weights_that_change_between_forward_and_backward_are_refused_as_ever() -> None:
    case = chain()
    model = dispatched(case)
    loss = case.loss(model, case.batches[0])
    with torch.no_grad():
        model.b[0][0].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*a weight that streams from the host"):
        loss.backward()


def test_frozen_weights_stream_without_gradients() -> None:
    def make() -> nn.Module:
        model = chain().make()
        model.b.requires_grad_(False)
        return model

    case = Case(make, chain().batches, loss_of, partial(_trainable, adamw))
    plain = case.plan()
    ran = case.run(streaming(plain))
    ran.assert_same(case.run(plain))
    assert ran.peaks == case.forecast(streaming(plain))


def _trainable(make: Any, parameters: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = make([parameter for parameter in parameters if parameter.requires_grad])
    return made


def test_a_copy_of_the_model_streams_its_own_weights() -> None:
    case = chain()
    model = dispatched(case)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    with torch.no_grad():
        expected = float(case.loss(case.make(), case.batches[0]))
        assert float(case.loss(model, case.batches[0])) == pytest.approx(expected)
        assert float(case.loss(other, case.batches[0])) == 0.0


def test_evaluation_leaves_nothing_that_training_could_not_save() -> None:
    case = chain()
    model = dispatched(case)
    with torch.inference_mode():
        model(case.batches[0])
    case.loss(model, case.batches[0]).backward()


def test_an_error_in_a_block_gives_its_weights_back() -> None:
    case = chain()
    model = dispatched(case)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, WIDTH + 1))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    case.loss(model, case.batches[0]).backward()


class LosesNumbers(nn.Module):
    """Puts a tensor without numbers in the place of its first buffer, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mark", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1))
        self.loses = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.loses:
            self.mark = torch.zeros(1, device="meta")
        return self.linear(x)


def test_a_buffer_that_cannot_be_put_back_keeps_no_other_from_that() -> None:
    case = chain(b=LosesNumbers)
    model = dispatched(case)
    model.b.loses = True
    with torch.no_grad(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model(case.batches[0])
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert model.b.calls.item() == 1
    assert held() == 0


def test_a_weight_that_another_block_has_on_its_device_is_refused_by_name() -> None:
    model = Three()
    model.c.linear.weight = model.a.linear.weight
    blocks = Blocks(("a", "b", "c"), ((model.a,), (model.b,), (model.c,)))
    with pytest.raises(ValueError, match=r"streams 'c.linear.weight' from the host, but 'a.linear.weight' is the same"):
        refuse_shared_weights(model, blocks, [1, 2])
    refuse_shared_weights(model, blocks, [0, 2])


def test_blocks_that_stream_are_at_home_on_the_host() -> None:
    device = torch.device("simulated", 1)
    assert homes_of(Running(streamed=(1,)), [device, device]) == [device, torch.device("cpu")]
