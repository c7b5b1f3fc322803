"""With a declared share, operations that depend on unknown numbers have the shapes of a mask that selects so much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance import compat
from autobalance.profiling.known_values import KnownValues
from autobalance.simulated import fake_elements
from autobalance.simulated.bounds import selecting

# Numbers of which just three in four are above 0 or, in the second row, differ.
NUMBERS = torch.tensor([[1.0, 2.0, -1.0, 3.0], [1.0, 5.0, 6.0, -2.0]])

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: (x > 0).nonzero(),
    "as tuple": lambda x: (x > 0).nonzero(as_tuple=True),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index": lambda x: x[x > 0],
    "index of rows": lambda x: x.t()[x[1] > 0],
    "write": lambda x: torch.zeros_like(x).index_put((x > 0,), x[x > 0]),
    "unique": lambda x: torch.unique(x[0] * 2 // 3 * 0 + torch.arange(4, device=x.device).clamp(max=2) * x.abs()[0, 0]),
    "unique with details": lambda x: torch.unique(
        x[0] * 0 + torch.arange(4, device=x.device).clamp(max=2), return_inverse=True, return_counts=True
    ),
    "consecutive": lambda x: torch.unique_consecutive(x[0] * 0 + torch.arange(4, device=x.device).clamp(max=2)),
}


def shapes(value: Any) -> list[tuple[int, ...]]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [tuple(item.shape) for item in values]


@pytest.mark.parametrize("name", OPERATIONS)
def test_shapes_are_those_of_real_numbers_of_which_that_share_is_selected(name: str) -> None:
    expected = shapes(OPERATIONS[name](NUMBERS))
    assert any(3 in shape or 6 in shape for shape in expected) or name == "write"
    mode = compat.make_fake_mode()
    with autobalance.simulate(1), fake_elements(mode), selecting(0.75) as used:
        assert shapes(OPERATIONS[name](torch.randn(2, 4, device="simulated:0"))) == expected
    assert used
    with mode, KnownValues(mode, lambda kind: None), selecting(0.75):
        assert shapes(OPERATIONS[name](torch.randn(2, 4))) == expected


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x)[x > 0].pow(2)


@pytest.mark.parametrize("target", ["simulated", "cpu", "cuda"])
def test_profile_takes_a_declared_share_and_says_so(target: str) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).sum()
        return loss

    def profile(selected: float | None) -> autobalance.Profile:
        return autobalance.profile(Selects(), torch.ones(64, 64), step=step, selected=selected, target=target)

    half, everything = profile(0.5), profile(1.0)
    declared = "masks whose numbers only real data know were taken to select 50% of the elements, as declared (index)"
    assert half.notes[0] == declared
    assert all("waits for the device" in note for note in half.notes[1:])
    # Half of 64 * 64 floats, which the square saves; the index saves the mask itself.
    assert everything.blocks[1].saved - half.blocks[1].saved == 2048 * 4
    assert "one real step was run" in profile(None).notes[0]


def test_a_share_is_from_nothing_to_everything() -> None:
    with pytest.raises(ValueError, match=r"selected=1\.5 is no share: it is from 0 \(nothing\) to 1 \(everything\)"):
        autobalance.profile(Selects(), torch.ones(2, 64), selected=1.5)
