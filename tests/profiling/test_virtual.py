"""Every block in a place of its own, on one device: copies are seen once, and known to be one tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autobalance.kernels.target import SIMULATED
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.virtual import VirtualLocator
from autobalance.profiling.world import make_world


@pytest.fixture
def traced() -> Iterator[tuple[Tracer, VirtualLocator]]:
    tracer = Tracer()
    world = make_world("fake", SIMULATED, 1, tracer, lambda note: None, lambda *operation: None)
    with world, world.charging(0):
        yield tracer, VirtualLocator(tracer, world)


def made(*shape: int) -> Tensor:
    return torch.ones(*shape, device="simulated:0")


def test_copy_is_charged_to_its_place_and_holds_the_same_value(traced: tuple[Tracer, VirtualLocator]) -> None:
    tracer, locator = traced
    source = made(200)
    copied = locator.send(source, 3)
    assert locator.place_of(source) == 0
    assert locator.place_of(copied) == 3
    assert tracer.values == [0, 0]
    assert list(locator.exchanges) == [(0, 3)]


def test_copy_is_made_once_for_each_place(traced: tuple[Tracer, VirtualLocator]) -> None:
    tracer, locator = traced
    source = made(200)
    first, again, other = locator.send(source, 3), locator.send(source, 3), locator.send(source, 4)
    assert first is again
    assert other is not first
    assert tracer.accounts == [0, 3, 4]


def test_copies_of_a_part_are_one_tensor_but_not_one_with_the_whole(traced: tuple[Tracer, VirtualLocator]) -> None:
    tracer, locator = traced
    part = made(10, 200)[2]
    copies = [locator.send(part, place) for place in (1, 2)]
    assert [copied.shape for copied in copies] == [(200,)] * 2
    assert tracer.sizes == [8192, 1024, 1024]
    assert tracer.values[0] == -1
    assert tracer.values[1] == tracer.values[2] >= 0
    assert tracer.wholes == {1: 0, 2: 0}


def test_a_copy_of_a_parts_copy_remembers_the_copy(traced: tuple[Tracer, VirtualLocator]) -> None:
    tracer, locator = traced
    locator.send(locator.send(made(10, 200)[2], 1), 2)
    assert tracer.wholes == {1: 0, 2: 1}
    assert tracer.values[1] == tracer.values[2] >= 0


class Carrier:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_what_an_object_moves_itself_is_shared_with_nobody(traced: tuple[Tracer, VirtualLocator]) -> None:
    tracer, locator = traced
    source = made(200)
    plain, moved = locator.send(source, 3), locator.send_object(Carrier(source), 3)
    assert moved.tensor is not plain
    assert (tracer.values, tracer.wholes) == ([0, 0, -1], {2: 0})  # on the device of its source it is a view of it


def test_gradient_goes_back_to_where_the_tensor_came_from(traced: tuple[Tracer, VirtualLocator]) -> None:
    _, locator = traced
    source = made(200).requires_grad_()
    locator.send(source, 3).mul(2).sum().backward()
    assert source.grad is not None
    assert locator.place_of(source.grad) == 0


def test_changed_argument_is_remembered_with_its_maker(traced: tuple[Tracer, VirtualLocator]) -> None:
    _, locator = traced
    locator.changed_in_place(made(2), 5, "a block")
    assert locator.changed == {(0, 5)}
