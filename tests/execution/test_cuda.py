"""Order, results, peaks and copies on GPUs: with all stages on one, and on two. What can run without one does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.blocks import Blocks
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.seeds import SeededVisits
from autobalance.placement import couriers
from autobalance.placement.host_path import through_host
from autobalance.placement.install import install
from autobalance.placement.lanes import lane_between
from autobalance.placement.locate import DeviceLocator
from autobalance.placement.pairs import check_pairs
from autobalance.placement.place import place
from autobalance.placement.ready import awaiting, mark_ready, ready_event
from autobalance.simulated import backend, simulate
from tests.execution.test_launch_order import (
    IN_FLIGHT,
    TEXTBOOK,
    Everything,
    in_flight,
    launches,
    rounds,
    stage_of,
    train,
)

ONE_GPU = pytest.mark.cuda
TWO_GPUS = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.fixture(autouse=True)
def simulated(request: pytest.FixtureRequest) -> Any:
    """Two of them, but for tests of GPUs: once torch knows simulated devices, autograd minds no streams of CUDA."""
    if request.node.get_closest_marker("cuda"):
        if backend.is_registered():
            pytest.skip("devices are simulated in this process: run `pytest -m cuda` by itself")
        yield
        return
    with simulate(2):
        yield


def settle(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.get_device_module(device).synchronize(device)


# Order.


@pytest.mark.cuda
@pytest.mark.parametrize("schedule", TEXTBOOK)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_stages_on_one_gpu_see_the_order_of_the_textbook(stages: int, schedule: str) -> None:
    model = Everything(stages, shared=True)
    for count in (1, stages, 2 * stages + 1):
        seen = train(model, schedule, range(stages), count, on="cuda:0")
        assert {one.device for one in seen} == {0}
        for stage in range(stages):
            assert launches(seen, stage) == TEXTBOOK[schedule](stage, stages, count), (count, stage)
            assert in_flight(seen, stage) == IN_FLIGHT[schedule](stage, stages, count), (count, stage)


@pytest.mark.parametrize("on", [pytest.param("cuda", marks=TWO_GPUS), "simulated"])
@pytest.mark.parametrize("schedule", ["naive", "1f1b"])
def test_two_devices_see_the_order_of_the_textbook(schedule: str, on: str) -> None:
    seen = train(Everything(2, shared=False), schedule, range(2), 5, on=on)
    assert all(one.device == stage_of(one) for one in seen)
    for stage in range(2):
        assert launches(seen, stage) == TEXTBOOK[schedule](stage, 2, 5)


@pytest.mark.parametrize("on", [pytest.param("cuda", marks=TWO_GPUS), "simulated"])
@pytest.mark.parametrize("schedule", ["gpipe"])
def test_each_of_two_devices_goes_forward_and_then_back(schedule: str, on: str) -> None:
    """Autograd has a thread for each GPU, so that only the order of each of them is fixed."""
    seen = train(Everything(2, shared=False), schedule, range(2), 5, on=on)
    for stage in range(2):
        assert launches(seen, stage) == TEXTBOOK[schedule](stage, 2, 5)


@pytest.mark.parametrize("on", [pytest.param("cuda", marks=TWO_GPUS), "simulated"])
def test_two_devices_on_a_loop_take_groups_round_by_round(on: str) -> None:
    seen = train(Everything(4, shared=False), "looped", [0, 1, 0, 1], 4, on=on)
    for device in range(2):
        forwards = [("F", *launch) for launch in rounds(4, 2, device, 4)]
        here = ((one.way, stage_of(one), one.number) for one in seen if one.device == device and one.way == "F")
        assert [key for key, _ in groupby(here)] == forwards


# Results and peaks. Blocks work element by element, so that no library keeps a workspace.

SIDE, STAGES, PARTS = 512, 4, 12
SIZE = 4 * SIDE * SIDE
"""Bytes of everything that a block is given, has and returns."""


class Scaled(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, SIDE * SIDE).reshape(SIDE, SIDE))
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(x * self.weight))  # saves what it is given and what it returns


class Chain(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(drop) for _ in range(2 * STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Step:
    """A chain of four stages on devices, run in parts."""

    def __init__(self, schedule: str, devices: Sequence[torch.device], drop: float = 0.0) -> None:
        self.model = Chain(drop).train(drop > 0)
        self.devices = tuple(dict.fromkeys(devices))
        places = [device for device in devices for _ in range(2)]
        stage_of = [stage for stage in range(STAGES) for _ in range(2)]
        blocks = Blocks.of(self.model, [(block,) for block in self.model.blocks])
        indices = [self.devices.index(device) for device in devices]
        self.pipeline = Pipeline(schedule, stage_of, indices, [SeededVisits(blocks.names, places)])
        place(self.model, blocks, places, {}, places[-1])
        self.installed = install(self.model, blocks, places, DeviceLocator(places), visitor=self.pipeline)
        self.inputs = [
            torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(number)).to(places[0])
            for number in range(PARTS)
        ]
        self.losses: dict[int, Tensor] = {}

    def run(self, seed: int | None = None) -> float:
        """Mean of the losses."""
        total: list[Tensor] = []

        def forward(number: int) -> None:
            with self.installed.glue():
                self.losses[number] = self.model(self.inputs[number]) / PARTS
                total.append(self.losses[number].detach())

        def backward(numbers: Sequence[int]) -> None:
            with self.installed.glue():
                losses = [self.losses.pop(number) for number in numbers]
                sum(losses[1:], start=losses[0]).backward()

        self.pipeline.train(PARTS, forward, backward, seed)
        return sum(float(loss) for loss in total)

    def peaks(self) -> list[int]:
        """Most bytes beside weights, gradients and inputs, for each device."""
        self.run()
        settle(self.devices)
        before = []
        for device in self.devices:
            module = torch.get_device_module(device)
            module.reset_peak_memory_stats(device)
            before.append(module.memory_allocated(device))
        self.run()
        settle(self.devices)
        return [
            torch.get_device_module(device).max_memory_allocated(device) - held
            for device, held in zip(self.devices, before, strict=True)
        ]


ON_ONE = [pytest.param("cuda:0", marks=ONE_GPU), "simulated:0"]
ON_TWO = [pytest.param("cuda", marks=TWO_GPUS), "simulated"]


@pytest.mark.parametrize("on", ON_ONE)
def test_peaks_on_one_device_follow_what_is_in_flight(on: str) -> None:
    """Where a backward begins, each block holds its output for each micro-batch in flight, and the square has four
    tensors of its own: the gradient that comes, the power of one less, its double, and the gradient that goes."""
    peaks = {
        schedule: Step(schedule, [torch.device(on)] * STAGES).peaks()[0] for schedule in ("naive", "gpipe", "1f1b")
    }
    held = {
        schedule: sum(2 * IN_FLIGHT[schedule](stage, STAGES, PARTS) for stage in range(STAGES)) * SIZE
        for schedule in peaks
    }
    for schedule, peak in peaks.items():
        assert peak == pytest.approx(held[schedule] + 4 * SIZE, rel=0.005), schedule


@pytest.mark.parametrize("on", ON_ONE)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "looped"])
def test_gradients_are_those_of_the_model_whole(schedule: str, on: str) -> None:
    check_gradients(schedule, [torch.device(on)] * STAGES)


@pytest.mark.parametrize("on", ON_TWO)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "looped"])
def test_gradients_on_two_devices_are_those_of_the_model_whole(schedule: str, on: str) -> None:
    order = (0, 1, 0, 1) if schedule == "looped" else (0, 0, 1, 1)
    check_gradients(schedule, [torch.device(on, index) for index in order])


def check_gradients(schedule: str, devices: Sequence[torch.device]) -> None:
    step = Step(schedule, devices)
    loss = step.run()
    whole = Chain().eval().to(devices[0])
    expected = whole(torch.stack(step.inputs))
    expected.backward()
    assert loss == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs in zip(step.model.parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        difference = (ours.grad.cpu() - theirs.grad.cpu()).abs().max()
        assert float(difference) <= 1e-6 * float(theirs.grad.abs().max())


@pytest.mark.parametrize("on", ON_ONE)
def test_masks_are_the_same_under_every_schedule(on: str) -> None:
    losses = [
        Step(schedule, [torch.device(on)] * STAGES, drop=0.5).run(seed=3) for schedule in ("naive", "gpipe", "1f1b")
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    other = Step("naive", [torch.device(on)] * STAGES, drop=0.5).run(seed=4)
    assert other != pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("on", ON_TWO)
def test_peaks_on_two_devices_are_those_of_the_stages_on_each(on: str) -> None:
    """Of the first device only blocks hold something; the second holds the copies that it was sent as well."""
    step = Step("1f1b", [torch.device(on, index) for index in (0, 0, 1, 1)])
    peaks = step.peaks()
    in_flight = [IN_FLIGHT["1f1b"](stage, STAGES, PARTS) for stage in range(STAGES)]
    first = 2 * (in_flight[0] + in_flight[1]) * SIZE
    second = (2 * (in_flight[2] + in_flight[3]) + in_flight[2]) * SIZE
    assert first <= peaks[0] <= first + 4.1 * SIZE
    assert second <= peaks[1] <= second + 4.1 * SIZE


# Copies.


def busy(device: torch.device) -> Any:
    """An event after work that takes a GPU a long time."""
    factor = torch.ones(8192, 8192, device=device)
    product = torch.empty_like(factor)
    torch.mm(factor, factor, out=product)  # sets the library up
    torch.cuda.synchronize(device)
    for _ in range(30):
        torch.mm(factor, factor, out=product)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return done


@pytest.mark.cuda
@pytest.mark.parametrize("pair", [(0, 0), pytest.param((0, 1), marks=TWO_GPUS), pytest.param((1, 0), marks=TWO_GPUS)])
def test_a_copy_overlaps_with_what_its_source_computes_meanwhile(pair: tuple[int, int]) -> None:
    source, target = (torch.device("cuda", index) for index in pair)
    x = torch.arange(1000.0, device=source)
    couriers.carry(x, target)  # sets peer access up
    lane = lane_between(source, target)
    assert lane is not None
    with awaiting([x]):
        mark_ready()
        done = busy(source)
        copied = couriers.carry(x, target, ready_event(x))
        lane.receiving.synchronize()
        assert not done.query(), "the copy has waited for work that came after its source"
    assert copied.device == target
    assert torch.equal(copied.cpu(), torch.arange(1000.0))


@pytest.mark.cuda
@pytest.mark.parametrize("pair", [(0, 0), pytest.param((0, 1), marks=TWO_GPUS)])
def test_a_copy_waits_for_its_source_and_its_reader_for_the_copy(pair: tuple[int, int]) -> None:
    source, target = (torch.device("cuda", index) for index in pair)
    x = torch.zeros(2**20, device=source)
    busy(source)
    x.add_(3)
    copied = couriers.carry(x, target)
    total = copied.sum()
    del x, copied
    torch.zeros(2**20, device=source)  # would be given the memory of x, were the copy not known to read it
    assert float(total) == 3.0 * 2**20


@pytest.mark.cuda
@pytest.mark.parametrize("target", ["cuda:0", pytest.param("cuda:1", marks=TWO_GPUS)])
def test_what_goes_through_the_host_arrives_bit_for_bit(target: str) -> None:
    source, place_ = torch.device("cuda:0"), torch.device(target)
    lane = lane_between(source, place_)
    assert lane is not None
    x = torch.randn(1000, 333, device=source).t()
    torch.cuda.synchronize(source)
    with torch.cuda.stream(lane.sending), torch.cuda.stream(lane.receiving):
        copied = through_host(x, place_, lane, chunk=4096)
    lane.receiving.synchronize()
    assert copied.stride() == x.stride()
    assert torch.equal(copied.cpu(), x.cpu())


@pytest.mark.parametrize("on", ON_TWO)
def test_pairs_of_devices_are_tested(on: str, recwarn: pytest.WarningsRecorder) -> None:
    check_pairs([torch.device(on, 0), torch.device(on, 1)])
    ours = [str(warning.message) for warning in recwarn if "arrive corrupted" in str(warning.message)]
    assert not ours, "this machine corrupts copies between its GPUs: " + "; ".join(ours)
