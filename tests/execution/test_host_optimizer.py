"""Optimizers whose state is in host memory: the same updates, and everybody else sees the optimizer they know."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import autobalance
from autobalance.execution.savings.host_optimizer import host_parameters, is_on_host, on_host
from autobalance.partitioning.judge import judge
from autobalance.partitioning.transfers import crossings_of
from autobalance.simulated import simulate
from autobalance.strategy.optimizers import send_state_home
from tests.execution.saving_runs import adamw, case_of

Made = Callable[[Any], Optimizer]
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)


@pytest.fixture(autouse=True)
def simulated_devices() -> Iterator[None]:
    with simulate(2):
        yield


@pytest.mark.parametrize(("name", "precision"), [("gpt", "bf16-mixed"), ("tied embedding", "32-true")])
def test_training_is_the_same_and_peaks_are_those_of_plan_and_forecast(name: str, precision: str) -> None:
    case = case_of(name, precision=precision, optimizer=adamw)
    plain = case.plan()
    plan = replace(plain, host_optimizer=(0, 1))
    ran, kept = case.run(plan), case.run(plain)
    ran.assert_same(kept)
    assert plain.profile is not None
    given = plain.profile, plan.assignment, plan.root, plan.devices, crossings_of(plain.profile)
    assert ran.peaks == case.forecast(plan) == list(judge(*given, host_optimizer=plan.host_optimizer).peaks)
    assert max(ran.peaks) < max(kept.peaks)


def test_the_state_of_the_other_device_stays_there() -> None:
    case = case_of("gpt", optimizer=adamw)
    plan = replace(case.plan(), host_optimizer=(1,))

    def look(model: nn.Module, optimizer: Optimizer) -> None:
        for parameter in model.parameters():
            where = "cpu" if parameter.device.index == 1 else "simulated"
            assert optimizer.state[parameter]["exp_avg"].device.type == where

    case.run(plan, look)


def test_dispatch_tells_how_to_keep_the_state_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    case = case_of("gpt", optimizer=adamw)
    autobalance.dispatch(case.make(), replace(case.plan(), host_optimizer=(1,)))
    assert "The plan keeps the optimizer state of device 1 on the host" in caplog.text
    assert "['simulated:1']" in caplog.text


def model_on_device() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to("simulated:0")


class Pair:
    """The same model twice: its optimizer's state on the device, and on the host."""

    def __init__(self, make: Made, away: Callable[[nn.Module], Any] | None = None) -> None:
        self.models = [model_on_device(), model_on_device()]
        self.optimizers = [make(model.parameters()) for model in self.models]
        away = away or (lambda model: host_parameters(model, [torch.device("simulated", 0)]))
        on_host(self.optimizers[1], away(self.models[1]))

    def losses(self) -> list[Tensor]:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return [model(torch.ones(5, 3, device="simulated:0")).square().mean() for model in self.models]

    def step(self) -> None:
        for loss, optimizer in zip(self.losses(), self.optimizers, strict=True):
            loss.backward()
            optimizer.step()

    def assert_same(self) -> None:
        for mine, theirs in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.equal(mine.cpu(), theirs.cpu())


@pytest.mark.parametrize(
    "make",
    [
        MOMENTUM,
        partial(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=False),
        partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, foreach=False),
        partial(torch.optim.Adagrad, lr=1e-2, foreach=False),
        partial(torch.optim.NAdam, lr=1e-2, foreach=False),
    ],
)
def test_any_optimizer_does_what_it_does_on_the_device(make: Made) -> None:
    pair = Pair(make)
    for _ in range(3):
        pair.step()
    pair.assert_same()
    for state in pair.optimizers[1].state.values():
        assert all(value.device.type == "cpu" for value in state.values() if isinstance(value, Tensor))


def test_the_fused_step_of_the_host_runs_there() -> None:
    pair = Pair(partial(torch.optim.AdamW, lr=1e-2))
    pair.optimizers[1].param_groups[0]["fused"] = True
    for _ in range(3):
        pair.step()
    for mine, theirs in zip(*(model.parameters() for model in pair.models), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu())


def test_a_closure_runs_on_the_device_and_gradients_stay_there() -> None:
    pair = Pair(MOMENTUM)
    optimizer, model = pair.optimizers[1], pair.models[1]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(5, 3, device="simulated:0")).square().mean()
        loss.backward()
        return loss

    pair.step()
    before = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    loss = optimizer.step(closure)
    assert loss.device.type == "simulated"
    pair.losses()[0].backward()
    pair.optimizers[0].step()
    pair.assert_same()
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(mine is theirs for mine, theirs in zip(before, after, strict=True))
    assert [id(parameter) for parameter in optimizer.state] == [id(parameter) for parameter in after]


def test_groups_schedules_and_clipping_are_those_of_the_optimizer() -> None:
    def make(parameters: Any) -> Optimizer:
        first, *others = parameters
        return torch.optim.SGD(
            [{"params": [first], "lr": 1.0}, {"params": others}], lr=0.1, momentum=0.9, foreach=False
        )

    pair = Pair(make)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in pair.optimizers]
    for _ in range(3):
        for loss, model, optimizer in zip(pair.losses(), pair.models, pair.optimizers, strict=True):
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    pair.assert_same()


def test_a_gradient_scaler_skips_the_steps_that_it_would_skip() -> None:
    pair = Pair(MOMENTUM)
    for scale_of_loss in (1.0, float("inf"), 1.0):
        for loss, optimizer in zip(pair.losses(), pair.optimizers, strict=True):
            scaler = torch.amp.GradScaler("simulated", init_scale=4.0)
            scaler.scale(loss * scale_of_loss).backward()
            scaler.step(optimizer)
            scaler.update()
    pair.assert_same()
    assert all(torch.isfinite(parameter.cpu()).all() for parameter in pair.models[1].parameters())


def test_weights_that_somebody_has_changed_are_those_that_are_updated() -> None:
    pair = Pair(MOMENTUM)
    pair.step()
    for model in pair.models:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)
    pair.step()
    pair.assert_same()


def test_state_can_be_saved_and_loaded_both_ways() -> None:
    pair = Pair(MOMENTUM)
    pair.step()
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    assert saved[0]["state"].keys() == saved[1]["state"].keys()
    before = torch.simulated.memory_allocated(0)
    for optimizer, state in zip(pair.optimizers, reversed(saved), strict=True):
        optimizer.load_state_dict(state)
    assert torch.simulated.memory_allocated(0) == before
    send_state_home(pair.optimizers)
    assert all(is_on_host(pair.optimizers[1], parameter) for parameter in pair.models[1].parameters())
    devices = [
        {value["momentum_buffer"].device.type for value in optimizer.state.values()} for optimizer in pair.optimizers
    ]
    assert devices == [{"simulated"}, {"cpu"}]
    pair.step()
    pair.assert_same()


def test_a_step_that_fails_leaves_the_optimizer_to_its_parameters() -> None:
    pair = Pair(MOMENTUM)
    pair.step()
    optimizer = pair.optimizers[1]
    own = list(optimizer.param_groups[0]["params"])

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    handle = optimizer.register_step_post_hook(fail)
    pair.losses()[1].backward()
    with pytest.raises(RuntimeError, match=r"^no$"):
        optimizer.step()
    handle.remove()
    assert all(mine is theirs for mine, theirs in zip(optimizer.param_groups[0]["params"], own, strict=True))


def test_parameters_without_a_gradient_are_left_alone() -> None:
    pair = Pair(MOMENTUM)
    pair.step()
    before = [parameter.cpu() for parameter in pair.models[1].parameters()]
    pair.optimizers[1].zero_grad()
    pair.optimizers[1].step()
    assert all(torch.equal(one, two.cpu()) for one, two in zip(before, pair.models[1].parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (partial(torch.optim.LBFGS, lr=0.1), "LBFGS gathers the gradients of all parameters in one tensor"),
        (
            partial(torch.optim.Adam, lr=0.1, differentiable=True),
            "made with differentiable=True, which",
        ),
    ],
)
def test_what_cannot_step_on_the_host_is_refused_in_words(make: Made, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Pair(make)


def test_a_capturable_step_is_refused_in_words() -> None:
    model = model_on_device()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match=r"the state of Adam on the host.*capturable=True.*offload=False"):
        on_host(optimizer, model.parameters())  # type: ignore[arg-type]
