"""What operations write to is put back, whichever way they write, and nothing else is copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autobalance.execution.equivalence.writes_kept import WritesKept
from autobalance.simulated import simulate

Write = Callable[[nn.Parameter, Tensor], object]


def _assign(weight: nn.Parameter, buffer: Tensor) -> None:
    weight.data = torch.zeros_like(weight)


WRITES: dict[str, Write] = {
    "in place": lambda weight, buffer: weight.mul_(2),
    "through a view": lambda weight, buffer: buffer[1:].add_(1),
    "through data": lambda weight, buffer: weight.data.mul_(2),
    "a list": lambda weight, buffer: torch._foreach_add_([weight, buffer], 1.0),
    "out": lambda weight, buffer: torch.add(buffer, 1, out=buffer),
    "other data": _assign,
}


@pytest.mark.parametrize("device", ["cpu", "simulated:1"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen_and_undone(name: str, device: str) -> None:
    with simulate(2):
        weight, buffer = nn.Parameter(torch.ones(3, 2, device=device)), torch.arange(6.0, device=device)
        kept = WritesKept([weight, buffer])
        for _ in range(2):
            with torch.no_grad(), kept:
                WRITES[name](weight, buffer)
            assert kept.has_changed(weight) or kept.has_changed(buffer)
            kept.put_back()
            assert not kept.has_changed(weight)
            assert weight.tolist() == [[1.0, 1.0]] * 3
            assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert weight.requires_grad


def test_what_is_only_read_is_not_changed() -> None:
    weight = torch.ones(3)
    kept = WritesKept([weight])
    with kept:
        _ = (weight * 2).add_(1)
    assert not kept.has_changed(weight)
    assert kept.has_changed(torch.ones(3))  # another tensor than any that is known
