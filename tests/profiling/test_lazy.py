"""A model with lazy modules is profiled as the same model that knows its sizes, and stays lazy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import autobalance
from autobalance.blocks import find_blocks
from autobalance.measuring.measure import measure
from autobalance.profiling.trial import Batch, PlainTrial


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).sum()


class Net(nn.Module):
    """Convolution, batch norm and linear layers; `lazy` ones are told no sizes."""

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.stem = (
            nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU())
            if lazy
            else nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        )
        self.hidden = nn.LazyLinear(16, bias=False) if lazy else nn.Linear(8 * 36, 16, bias=False)
        self.head = nn.LazyLinear(4) if lazy else nn.Linear(16, 4)

    def self_balance(self) -> list[nn.Module]:
        return [self.stem, self.hidden, self.head]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.stem(x).flatten(1)))


BATCH = torch.ones(4, 3, 8, 8)


@pytest.mark.parametrize("target", ["simulated", "cpu", "cuda"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lazy_model_costs_what_the_model_with_sizes_costs(target: str, precision: str) -> None:
    options: Any = {"optimizer": torch.optim.Adam, "step": squares, "target": target, "precision": precision}
    model = Net(lazy=True)
    lazy, known = autobalance.profile(model, BATCH, **options), autobalance.profile(Net(lazy=False), BATCH, **options)
    for row, expected in zip(lazy.blocks, known.blocks, strict=True):
        assert row.name == expected.name
        assert (row.weights, row.buffers, row.optimizer) == (expected.weights, expected.buffers, expected.optimizer)
        assert (row.saved, row.backward_transient) == (expected.saved, expected.backward_transient)
    assert lazy.peak() == known.peak()
    assert lazy.notes == known.notes


def test_the_model_stays_lazy_and_random_numbers_what_they_were() -> None:
    model = Net(lazy=True)
    drawn = torch.get_rng_state()
    attributes = [sorted(vars(module)) for module in model.modules()]
    autobalance.profile(model, BATCH, optimizer=torch.optim.Adam, step=squares)
    assert sum(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())) == 9
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert type(model.hidden) is nn.LazyLinear
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model(BATCH).shape == (4, 4)
    assert isinstance(model.hidden, nn.Linear)
    assert not isinstance(model.hidden, nn.LazyLinear)


def test_lazy_blocks_are_measured_too() -> None:
    def measured(lazy: bool) -> list[tuple[int, int]]:
        model = Net(lazy)
        batch = Batch("train batch", "train", BATCH)
        found = measure(model, batch, find_blocks(model), PlainTrial(step=squares), "simulated:0")
        return [(row.static, row.saved) for row in found]

    assert measured(True) == measured(False)


class Uncalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(4, 4), nn.LazyLinear(4), nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_lazy_module_that_is_not_called_is_named() -> None:
    with pytest.raises(ValueError, match="Call the model once on a real batch") as caught:
        autobalance.profile(Uncalled(), torch.ones(2, 4))
    assert str(caught.value).startswith(
        "2 lazy parameter(s) or buffer(s) got no shape from a dry pass of one batch (spare.weight, spare.bias): the "
        "step does not call the modules that hold them."
    )


class Own(nn.Module):
    """Holds a lazy parameter that no lazy module gives a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.UninitializedParameter()  # type: ignore[no-untyped-call]  # torch's own

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


def test_a_step_that_fails_before_all_shapes_are_known_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"1 lazy parameter.* \(scale\): the step failed: ValueError: Attempted to use"
    ):
        autobalance.profile(Own(), torch.ones(2, 4))


def fails_late(model: nn.Module, batch: Tensor) -> Tensor:
    loss = squares(model, batch)
    if loss > 10**9:
        raise ZeroDivisionError
    return loss


@pytest.mark.parametrize("step", [squares, fails_late])
def test_a_step_that_looks_at_its_loss_does_not_matter(step: Callable[..., Tensor]) -> None:
    assert autobalance.profile(Net(lazy=True), BATCH, step=step, target="simulated").blocks[2].weights == 1024
