"""Lines at which the host waits for the device."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.profiling.timeline import ROOT
from autobalance.profiling.waits import Waits


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = self.first(x)
        if kept.any():
            x = x[kept]
        return self.second(x)


def _line(text: str) -> str:
    lines, start = inspect.getsourcelines(Waiting.forward)
    return f"test_waits.py:{start + next(at for at, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize("target", ["simulated", "cpu", "cuda"])
def test_branches_and_masks_are_named_by_their_lines(target: str) -> None:
    batch = (torch.ones(4, 8), torch.tensor([True, False, True, True]))
    profile = autobalance.profile(Waiting(), batch, target=target)
    (note,) = [note for note in profile.notes if "the host waits for the device" in note]
    assert f"{_line('kept.any()')} (1 a step)" in note
    assert f"{_line('x[kept]')} (1 a step)" in note


def test_a_step_that_never_waits_has_no_note() -> None:
    profile = autobalance.profile(nn.Linear(8, 8), torch.ones(4, 8), optimizer=torch.optim.AdamW, target="simulated")
    assert not any("waits" in note for note in profile.notes)


def test_the_most_frequent_lines_come_first() -> None:
    waits = Waits()
    waits.lines.update({"a.py:1": 2, "b.py:2": 8, "c.py:3": 4, "d.py:4": 2})
    text = waits.in_words(steps=2)
    assert "at b.py:2 (4 a step), c.py:3 (2 a step), a.py:1 (1 a step), ...: " in text


def test_an_integer_index_is_no_wait() -> None:
    waits = Waits()
    x: Any = torch.ones(4)
    waits.saw(torch.ops.aten.index.Tensor, (x, [torch.tensor([0, 1])]))
    assert not waits.lines
    waits.saw(torch.ops.aten.index.Tensor, (x, [None, torch.tensor([True, False])]))
    assert sum(waits.lines.values()) == 1


@pytest.mark.parametrize("target", ["simulated", "cuda"])
def test_it_is_known_after_which_block_the_host_waits(target: str) -> None:
    batch = (torch.ones(4, 8), torch.tensor([True, False, True, True]))
    model = Waiting()
    profile = autobalance.profile(model, batch, optimizer=torch.optim.AdamW, target=target)
    assert profile.waits == (0,)
    first = autobalance.profile(model, batch, step=_scaled, target=target)
    assert first.waits == (ROOT, 0)
    alone = autobalance.profile(nn.Linear(8, 8), torch.ones(4, 8), optimizer=torch.optim.AdamW, target=target)
    assert alone.waits == ()


def _scaled(model: nn.Module, batch: Any) -> Tensor:
    """Reads a number of the batch before any block is called."""
    x, kept = batch
    loss: Tensor = model(x * float(x.sum()), kept).sum()
    return loss
