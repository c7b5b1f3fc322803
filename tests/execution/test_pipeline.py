from __future__ import annotations

import copy
import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.blocks.blocks import Blocks
from autobalance.execution.micro_batch import current_micro_batch
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.suspended import Suspended
from autobalance.placement.install import Installed, install
from autobalance.placement.locate import DeviceLocator
from tests.execution.test_suspended import threads

SCHEDULES = ("naive", "gpipe", "1f1b", "looped")


class Net(nn.Module):
    """Four blocks; `at` is called in the third with the number of the micro-batch."""

    def __init__(self, at: Callable[[int], None] = lambda number: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 2:
                micro_batch = current_micro_batch()
                assert micro_batch is not None
                self.at(micro_batch.index)
            x = block(x).tanh() + x
        return x


class Run:
    """A network under a pipeline on the CPU, and one micro-batched step of it."""

    def __init__(self, schedule: str, net: Net, parts: int = 8) -> None:
        self.net = net
        devices = [0, 1, 0, 1] if schedule == "looped" else [0, 1, 2, 3]
        self.pipeline = Pipeline(schedule, [0, 1, 2, 3], devices)
        blocks = Blocks(tuple(f"blocks.{index}" for index in range(4)), tuple((block,) for block in net.blocks))
        cpu = torch.device("cpu")
        self.installed: Installed = install(net, blocks, [cpu] * 4, DeviceLocator([cpu]), visitor=self.pipeline)
        self.inputs = torch.randn(parts, 2, 3, generator=torch.Generator().manual_seed(1))
        self.losses: dict[int, Tensor] = {}

    def step(self) -> None:
        self.net.zero_grad()
        self.losses.clear()
        self.pipeline.train(len(self.inputs), self.forward, self.backward)

    def forward(self, number: int) -> None:
        with self.installed.glue():
            self.losses[number] = self.net(self.inputs[number]).square().mean() / len(self.inputs)

    def backward(self, numbers: Any) -> None:
        torch.stack([self.losses.pop(number) for number in numbers]).sum().backward()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.net.parameters() if parameter.grad is not None]


def plain_gradients(net: Net, inputs: Tensor) -> list[Tensor]:
    x = inputs.flatten(0, 1)
    twin = copy.deepcopy(net)
    for block in twin.blocks:
        block._forward_pre_hooks.clear()
        block._forward_hooks.clear()
        x = block(x).tanh() + x
    x.square().mean().backward()
    return [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_gradients_are_those_of_the_whole_batch(schedule: str, parts: int) -> None:
    run = Run(schedule, Net(), parts)
    run.step()
    for gradient, expected in zip(run.gradients(), plain_gradients(run.net, run.inputs), strict=True):
        torch.testing.assert_close(gradient, expected)
    assert set(threads()) <= {"autobalance worker"}
    run.pipeline.close()
    assert threads() == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_in_one_micro_batch_surfaces_and_the_next_step_works(schedule: str) -> None:
    broken = [True]

    def at(number: int) -> None:
        if number == 3 and broken[0]:
            raise ValueError("micro-batch 3 is broken")

    run = Run(schedule, Net(at))
    with pytest.raises(ValueError, match="micro-batch 3 is broken") as caught:
        run.step()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["forward", "at"]
    assert threads() == []
    broken[0] = False
    run.step()
    for gradient, expected in zip(run.gradients(), plain_gradients(run.net, run.inputs), strict=True):
        torch.testing.assert_close(gradient, expected)
    run.pipeline.close()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("no gradient")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_in_a_backward_leaves_no_thread(schedule: str) -> None:
    run = Run(schedule, Net())
    run.net.blocks[1].register_forward_hook(lambda block, args, output: Fails.apply(output))
    with pytest.raises(ArithmeticError, match="no gradient"):
        run.step()
    assert threads() == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_interrupt_winds_all_micro_batches_down(schedule: str) -> None:
    def at(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    run = Run(schedule, Net(at))
    with pytest.raises(KeyboardInterrupt):
        run.step()
    assert threads() == []
    run.net.at = lambda number: None
    run.step()


def test_an_interrupt_of_the_waiting_thread_lets_the_running_one_come_to_its_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []
    run = Run("1f1b", Net())
    forward = run.forward

    def watched(number: int) -> None:
        try:
            forward(number)
        finally:
            closed.append(number)

    wait, waits = Suspended._wait, []

    def interrupted(call: Suspended) -> None:
        waits.append(call)
        if len(waits) == 5:
            raise KeyboardInterrupt
        wait(call)

    monkeypatch.setattr(run, "forward", watched)
    monkeypatch.setattr(Suspended, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.step()
    assert sorted(closed) == [0, 1]  # the fifth wait is in the third tick, in which the third would have begun
    assert threads() == []


def test_what_an_interrupted_step_saved_is_freed() -> None:
    held: list[weakref.ref[Tensor]] = []

    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            held.append(weakref.ref(output))
            return output

    def at(number: int) -> None:
        if number == 2:
            raise ValueError("over")

    net = Net(at)
    net.blocks[1] = Keeps(3, 3)
    run = Run("1f1b", net)
    with pytest.raises(ValueError, match="over"):
        run.step()
    run.losses.clear()
    gc.collect()
    assert held
    assert not [reference for reference in held if reference() is not None]


def test_a_copy_of_a_hooked_model_is_never_suspended() -> None:
    run = Run("1f1b", Net())
    teacher = copy.deepcopy(run.net.blocks)
    before = run.net.forward

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in teacher:
                block(x)
        return before(x)

    run.net.forward = forward  # type: ignore[method-assign]
    run.step()
    for gradient, expected in zip(run.gradients(), plain_gradients(run.net, run.inputs), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_forwards_alone_come_in_order_and_run_where_they_were_asked_for() -> None:
    run, told = Run("1f1b", Net()), []
    run.pipeline.evaluate(4, lambda number: told.append((number, threading.current_thread().name)))
    assert told == [(number, threading.current_thread().name) for number in range(4)]


def test_a_weight_among_a_blocks_inputs_gets_no_hook_that_stays() -> None:
    class Times(nn.Linear):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * weight

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.weight = Times(3, 3), Times(3, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x, self.weight), self.weight)
            return out

    net, pipeline, cpu = Shares(), Pipeline("looped", [0, 1], [0, 1]), torch.device("cpu")
    blocks = Blocks(("first", "second"), ((net.first,), (net.second,)))
    install(net, blocks, [cpu] * 2, DeviceLocator([cpu]), visitor=pipeline)
    losses: dict[int, Tensor] = {}

    def forward(number: int) -> None:
        losses[number] = net(torch.full((2, 3), float(number))).sum()

    pipeline.train(2, forward, lambda numbers: losses.pop(numbers[0]).backward())
    assert net.weight.grad is not None
    assert not net.weight._backward_hooks


def test_a_branch_that_leaves_a_stage_out_is_no_obstacle() -> None:
    class Skips(Net):
        def forward(self, x: Tensor) -> Tensor:
            micro_batch = current_micro_batch()
            assert micro_batch is not None
            for number, block in enumerate(self.blocks):
                if number != 1 or micro_batch.index % 2:
                    x = block(x)
            return x

    for schedule in SCHEDULES:
        run = Run(schedule, Skips(), 6)
        run.step()
        alone = Run("naive", run.net, 6)
        found = [gradient.clone() for gradient in run.gradients()]
        alone.step()
        for gradient, expected in zip(found, alone.gradients(), strict=True):
            torch.testing.assert_close(gradient, expected)
