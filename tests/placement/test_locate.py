from __future__ import annotations

import copy
import pickle

import pytest
import torch

from autobalance.placement.locate import DeviceLocator, with_index


def device(index: int) -> torch.device:
    return torch.device("simulated", index)


def test_a_tensor_on_none_of_the_devices_has_no_place() -> None:
    locator = DeviceLocator([device(0), device(2)])
    assert locator.place_of(torch.ones(1, device="simulated:2")) == device(2)
    assert locator.place_of(torch.ones(1, device="simulated:1")) is None
    assert locator.place_of(torch.ones(1)) is None


def test_on_the_cpu_nothing_moves() -> None:
    assert DeviceLocator([torch.device("cpu")] * 4).nothing_moves
    assert not DeviceLocator([device(0), device(1)]).nothing_moves


def test_a_device_without_an_index_is_the_current_one() -> None:
    with torch.device("simulated:3"):
        assert with_index(torch.device("simulated")) == device(0), "a default device is not the current one"
    torch.simulated.set_device(2)
    try:
        assert with_index(torch.device("simulated")) == device(2)
        assert DeviceLocator([torch.device("simulated")]).devices == {device(2)}
    finally:
        torch.simulated.set_device(0)
    assert with_index(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("index", [0, 3])
def test_entering_makes_a_device_current_until_it_is_left(index: int) -> None:
    locator = DeviceLocator([device(0), device(3)])
    token = locator.enter(device(index))
    assert torch.simulated.current_device() == index
    locator.leave(token)
    assert torch.simulated.current_device() == 0


def test_a_copy_of_a_locator_knows_the_same_devices() -> None:
    locator = DeviceLocator([device(0), device(3)])
    for twin in (copy.deepcopy(locator), pickle.loads(pickle.dumps(locator))):
        assert twin.devices == locator.devices


def test_the_error_names_block_shape_and_ways_out() -> None:
    locator = DeviceLocator([device(0), device(1)])
    with pytest.raises(RuntimeError) as caught:
        locator.changed_in_place(torch.ones(2, 3, device="simulated:0"), device(1), "layers.3")
    text = str(caught.value)
    for part in (
        "'layers.3' on simulated:1",
        "(2, 3), torch.float32",
        "lives on simulated:0",
        "the change would be lost",
        "return",
    ):
        assert part in text
