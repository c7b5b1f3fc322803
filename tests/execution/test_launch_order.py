"""Devices see forwards and backwards in exactly the order of the textbook, whatever the user's forward looks like.

Blocks write down themselves what runs: each has a function of autograd inside that does so in forward and in backward.
Which micro-batch it is they read from the data, so that nothing is taken from the executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autobalance.blocks import Blocks
from autobalance.execution.pipeline import Pipeline
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator
from autobalance.placement.place import place
from autobalance.simulated import simulate

WIDTH = 4
Launch = tuple[str, int]  # "F" or "B", and the micro-batch


class Seen(NamedTuple):
    """What a block has written down.

    Attributes:
        way: "F" or "B".
        site: number of the call in the model's forward.
        number: of the micro-batch.
        device: index of the tensor's device; None on the host.
    """

    way: str
    site: int
    number: int
    device: int | None


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Seen], site: int, number: int) -> Tensor:
        ctx.seen, ctx.site, ctx.number = seen, site, number
        seen.append(Seen("F", site, number, x.device.index))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.seen.append(Seen("B", ctx.site, ctx.number, gradient.device.index))
        return gradient, None, None, None


class Block(nn.Module):
    """Takes and returns a nested container; `marker` says of each sample in which micro-batch it is."""

    def __init__(self, seen: list[Seen]) -> None:
        super().__init__()
        self.seen = seen
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, site: int, state: dict[str, Any], *, marker: Tensor) -> dict[str, Any]:
        x = Mark.apply(self.linear(state["x"]), self.seen, site, int(marker[0]))
        return {"x": torch.tanh(x), "rest": (state["x"], [None, marker])}


class Everything(nn.Module):
    """Three calls in each stage, with skips over all stages and over some, glue, and a loss in the middle.

    The last call is of a block that was called before: the first of the stage, or the first of the whole model.

    Args:
        stages: how many there are.
        shared: whether all stages call the first block of the model.
    """

    def __init__(self, stages: int, shared: bool) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self.shared = shared
        self.blocks = nn.ModuleList(Block(self.seen) for _ in range(2 * stages))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def call(self, site: int, block: int, x: Tensor, marker: Tensor) -> Tensor:
        state = self.blocks[block](site, {"x": x}, marker=marker)
        assert state["rest"][1][0] is None
        return state["x"] + 0.1 * state["rest"][0]

    def loss(self, x: Tensor, targets: Tensor, marker: Tensor) -> Tensor:
        stages, outputs, losses = len(self.blocks) // 2, [x], []
        for stage in range(stages):
            for site, block in enumerate((2 * stage, 2 * stage + 1, 0 if self.shared else 2 * stage), 3 * stage):
                x = self.call(site, block, x, marker)
            x = torch.cat([x, outputs[0]], -1).unflatten(-1, (2, WIDTH)).sum(-2) * self.scale
            x = x + outputs[len(outputs) // 2]
            outputs.append(x)
            if stage == stages // 2:
                losses.append(F.l1_loss(x, targets))
        return torch.stack([*losses, F.mse_loss(x + outputs[1], targets)]).sum()


def stage_of(seen: Seen) -> int:
    return seen.site // 3


def train(model: Everything, schedule: str, devices: Sequence[int], count: int, on: str = "cpu") -> list[Seen]:
    """One step in `count` parts, of two samples each; what blocks have seen."""
    names = [(block,) for block in model.blocks]
    apart = on in ("simulated", "cuda")  # else all stages are on the one device that is named
    places = [torch.device(on, device) if apart else torch.device(on) for device in devices for _ in range(2)]
    blocks, locator = Blocks.of(model, names), DeviceLocator(places)
    pipeline = Pipeline(schedule, [stage for stage in range(len(devices)) for _ in range(2)], devices)
    place(model, blocks, places, {}, root_device=places[-1])
    installed = install(model, blocks, places, locator, visitor=pipeline)
    losses: dict[int, Tensor] = {}

    def forward(number: int) -> None:
        data = torch.randn(2, 2, WIDTH, generator=torch.Generator().manual_seed(number)).to(places[-1])
        losses[number] = model.loss(data[0], data[1], torch.full((2,), number).to(places[-1])) / count

    def backward(numbers: Sequence[int]) -> None:
        torch.stack([losses.pop(number) for number in numbers]).sum().backward()

    model.seen.clear()
    with installed.glue():
        pipeline.train(count, forward, backward)
    installed.remove()
    assert not losses
    return list(model.seen)


def launches(seen: Sequence[Seen], stage: int) -> list[Launch]:
    """What one stage sees; the calls of one micro-batch that follow each other are one launch."""
    return [key for key, _ in groupby((one.way, one.number) for one in seen if stage_of(one) == stage)]


def in_flight(seen: Sequence[Seen], stage: int) -> int:
    """The most micro-batches of which a stage has seen a forward and not the last of the backward."""
    backwards, held, most = Counter[int](), set[int](), 0
    for one in seen:
        if stage_of(one) != stage:
            continue
        if one.way == "F":
            held.add(one.number)
        else:
            backwards[one.number] += 1
            held -= {one.number} if backwards[one.number] == 3 else set()
        most = max(most, len(held))
    return most


# The textbook: each device by itself, as the papers draw it.


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[Launch]:
    """As many forwards as stages are to come, this one included; then backward and forward in turns; then the rest."""
    warm_up = min(count, stages - stage)
    order = [("F", number) for number in range(warm_up)]
    for number in range(count):
        order.append(("B", number))
        if warm_up + number < count:
            order.append(("F", warm_up + number))
    return order


def forwards_then_backwards(stage: int, stages: int, count: int) -> list[Launch]:
    return [("F", number) for number in range(count)] + [("B", number) for number in reversed(range(count))]


def one_after_the_other(stage: int, stages: int, count: int) -> list[Launch]:
    return [(way, number) for number in range(count) for way in "FB"]


TEXTBOOK = {"1f1b": one_forward_one_backward, "gpipe": forwards_then_backwards, "naive": one_after_the_other}
IN_FLIGHT = {
    "1f1b": lambda stage, stages, count: min(count, stages - stage),
    "gpipe": lambda stage, stages, count: count,
    "naive": lambda stage, stages, count: 1,
}


@pytest.mark.parametrize("shared", [False, True], ids=["shared in a stage", "shared by all stages"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_each_stage_sees_the_order_of_the_textbook_for_every_number_of_micro_batches(
    stages: int, schedule: str, shared: bool
) -> None:
    model = Everything(stages, shared)
    for count in range(1, 4 * stages + 1):
        seen = train(model, schedule, range(stages), count)
        assert len(seen) == 2 * 3 * stages * count
        for stage in range(stages):
            assert launches(seen, stage) == TEXTBOOK[schedule](stage, stages, count), (count, stage)
            assert in_flight(seen, stage) == IN_FLIGHT[schedule](stage, stages, count), (count, stage)


@pytest.mark.parametrize("schedule", TEXTBOOK)
def test_the_order_is_that_of_the_devices_where_tensors_move(schedule: str) -> None:
    with simulate(4):
        seen = train(Everything(4, shared=False), schedule, range(4), 6, on="simulated")
    assert all(one.device == stage_of(one) for one in seen)
    for device in range(4):
        assert launches(seen, device) == TEXTBOOK[schedule](device, 4, 6)


@pytest.mark.parametrize("schedule", TEXTBOOK)
def test_gradients_of_the_parts_are_those_of_the_whole_batch(schedule: str) -> None:
    stages, count = 4, 6
    model = Everything(stages, shared=True)
    parts = [torch.randn(2, 2, WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(count)]
    whole = torch.cat(parts, 1)
    model.loss(whole[0], whole[1], torch.zeros(2 * count, dtype=torch.int64)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    train(model, schedule, range(stages), count)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def rounds(stages: int, devices: int, device: int, count: int) -> Iterator[tuple[int, int]]:
    """Forwards of a device on a loop: as many micro-batches as there are devices go round after round, then the next.

    Yields:
        Stage and micro-batch.
    """
    for first in range(0, count, devices):
        for stage in range(device, stages, devices):
            for number in range(first, min(first + devices, count)):
                yield stage, number


@pytest.mark.parametrize("shared", [False, True], ids=["shared in a stage", "shared by all stages"])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_devices_on_a_loop_take_groups_round_by_round_and_come_back_in_reverse(devices: int, shared: bool) -> None:
    stages = 2 * devices
    model = Everything(stages, shared)
    for count in (1, devices - 1, devices, devices + 1, 2 * devices, 4 * devices):
        seen = train(model, "looped", [stage % devices for stage in range(stages)], count)
        assert len(seen) == 2 * 3 * stages * count
        for device in range(devices):
            forwards = list(rounds(stages, devices, device, count))
            expected = [("F", *launch) for launch in forwards] + [("B", *launch) for launch in reversed(forwards)]
            here = ((one.way, stage_of(one), one.number) for one in seen if stage_of(one) % devices == device)
            assert [key for key, _ in groupby(here)] == expected, (count, device)
