"""Choices that only real numbers tell are taken as balanced, and said to be where something depends on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.simulated.guesses import guess

_aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (_aten.topk.default, (meta(3, 4), 2), [[0, 1], [2, 3], [0, 1]]),
        (_aten.topk.default, (meta(4, 3), 2, 0), [[0, 2, 0], [1, 3, 1]]),
        (_aten.argmax.default, (meta(5, 3), -1), [0, 1, 2, 0, 1]),
        (_aten.max.dim, (meta(2, 3), 1), [0, 1]),
        (_aten.sort.default, (meta(2, 3),), [[0, 1, 2], [0, 1, 2]]),
    ],
)
def test_every_entry_is_chosen_as_often_as_any_other(func: Any, args: Any, expected: Any) -> None:
    chosen = [value for value in guess(func, args, {}, func(*args)) if value is not None]
    assert [value.tolist() for value in chosen] == [expected]


def test_what_is_no_choice_is_not_guessed() -> None:
    value = meta(3, 4)
    assert guess(_aten.add.Tensor, (value, value), {}, value) == ()
    assert guess(_aten.argmax.default, (value,), {}, meta(dtype=torch.int64)) == ()  # of all elements: nothing to share


class Experts(nn.Module):
    """Sends each row to two of four experts; `looks` makes what follows depend on where they go."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        if not self.looks:
            return x * weights.sum(-1, keepdim=True) + chosen.sum()
        made = x
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).any(-1).nonzero().squeeze(-1)
            made = made.index_add(0, rows, expert(x[rows]))
        return made


@pytest.mark.parametrize("target", ["simulated", "cuda", "cpu"])
@pytest.mark.parametrize("looks", [True, False])
def test_choice_is_told_where_something_depends_on_it(looks: bool, target: str) -> None:
    found = autobalance.profile(Experts(looks), torch.randn(32, 16), optimizer=torch.optim.SGD, target=target)
    assert any("choice(s) that only real data know" in note for note in found.notes) is looks
    assert not any("cannot run" in note for note in found.notes)
