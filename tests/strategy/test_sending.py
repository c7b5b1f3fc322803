"""Parts made on the host reach a device as the run has them: views of the batch, or with memory of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autobalance import simulate
from autobalance.strategy.trials.sending import sent


class Graph:
    """Moves itself, but for the numbers of its nodes, as the batches of graph libraries do."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.nodes = x, torch.tensor([len(x)])

    def to(self, device: torch.device) -> Graph:
        self.x = self.x.to(device)
        return self


@pytest.fixture
def device() -> Iterator[torch.device]:
    with simulate(1):
        yield torch.device("simulated:0")


def test_views_of_the_batch_stay_views_of_it(device: torch.device) -> None:
    batch = torch.arange(12.0).view(3, 4)
    moved = batch.to(device)
    before = torch.get_device_module(device).memory_allocated(0)
    parts = sent([(part, "train") for part in batch.tensor_split(2, dim=1)], device, batch, moved)
    assert torch.get_device_module(device).memory_allocated(0) == before
    for (part, _), expected in zip(parts, batch.tensor_split(2, dim=1), strict=True):
        assert part.device == device
        torch.testing.assert_close(part.cpu(), expected)
    parts[0][0].zero_()
    assert moved.cpu()[:, :2].abs().sum() == 0


def test_views_of_one_storage_are_views_of_what_each_has_become(device: torch.device) -> None:
    text = torch.arange(9.0)
    batch = [text[:-1], text[1:]]  # each token, and the one to be predicted
    moved = [each.to(device) for each in batch]
    before = torch.get_device_module(device).memory_allocated(0)
    parts = sent([[each[:4] for each in batch], [each[4:] for each in batch]], device, batch, moved)
    assert torch.get_device_module(device).memory_allocated(0) == before
    assert [[each.tolist() for each in part] for part in parts] == [
        [[0, 1, 2, 3], [1, 2, 3, 4]],
        [[4, 5, 6, 7], [5, 6, 7, 8]],
    ]


def test_what_objects_move_of_themselves_shares_memory_as_on_the_host(device: torch.device) -> None:
    batch = torch.arange(2000.0)
    taken = batch[torch.randperm(2000)]
    moved = batch.to(device)
    before = torch.get_device_module(device).memory_allocated(0)
    parts = [Graph(part) for part in taken.split(500)]
    there = sent(parts, device, batch, moved)
    assert torch.get_device_module(device).memory_allocated(0) - before == 8192  # 8,000 bytes, rounded up
    assert torch.equal(torch.cat([part.x.cpu() for part in there]), taken)
    for part, graph in zip(there, parts, strict=True):
        assert graph.x.device.type == part.nodes.device.type == "cpu"
        assert part.x.device == device


def test_a_batch_that_is_another_on_the_device_shares_nothing(device: torch.device) -> None:
    batch = torch.arange(4.0)
    (part,) = sent([batch[:2]], device, batch, batch.to(device, torch.bfloat16))
    assert part.dtype is torch.float32
    assert part.tolist() == [0.0, 1.0]
