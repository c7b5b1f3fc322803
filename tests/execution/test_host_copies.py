"""Copies to the host and back have the numbers of the moment at which they were asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autobalance.execution.savings.host_copies import to_device, to_host, to_host_in_order
from autobalance.simulated import backend, simulate

KINDS = ["cpu", "simulated", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda":
        if backend.is_registered():
            pytest.skip("devices are simulated in this process: run `pytest -m cuda` by itself")
        yield torch.device("cuda", 0)
        return
    with simulate(1):
        yield torch.device(request.param)


@pytest.mark.parametrize("device", KINDS, indirect=True)
def test_a_tensor_goes_down_and_up_again(device: torch.device) -> None:
    tensor = torch.arange(6.0, device=device).reshape(2, 3).t()
    there = to_device(to_host(tensor), device).wait()
    assert there.device == tensor.device
    assert there.stride() == tensor.stride()
    assert there.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("device", KINDS, indirect=True)
def test_a_copy_in_order_is_of_what_was_there_before_the_next_change(device: torch.device) -> None:
    tensor = torch.ones(3, device=device, requires_grad=True)
    copied = to_host_in_order(tensor)
    with torch.no_grad():
        tensor.mul_(2)
    assert tensor.tolist() == [2, 2, 2]  # after which all copies are there
    assert copied.device.type == "cpu"
    assert not copied.requires_grad
    assert copied.tolist() == [1, 1, 1]


@pytest.mark.cuda
@pytest.mark.parametrize("device", KINDS[2:], indirect=True)
def test_pinned_memory_is_used_again_where_it_fits(device: torch.device) -> None:
    first = to_host_in_order(torch.ones(3, device=device))
    assert first.is_pinned()
    assert to_host_in_order(torch.zeros(3, device=device), into=first) is first
    assert to_host_in_order(torch.zeros(4, device=device), into=first) is not first
