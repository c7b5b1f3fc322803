from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import autobalance

ROWS = torch.randn(4, 8)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("model", "batch", "text"),
    [
        (nn.Linear, ROWS, r"model=Linear is a class: give an instance of it, such as Linear\(\.\.\.\)"),
        (None, ROWS, r"model is None, but a profile is of a torch.nn.Module"),
        (lambda rows: rows, ROWS, r"model is a function, but"),
        (make(), DataLoader(TensorDataset(ROWS)), r"one batch: give next\(iter\(loader\)\)"),
    ],
)
def test_what_is_no_model_or_no_batch_is_refused(model: Any, batch: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        autobalance.profile(model, batch)


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (lambda loss: None, TypeError, r"the step returned None, but backward runs from a tensor"),
        (lambda loss: {"loss": loss}, TypeError, r"the step returned a dict, .* such as output\.loss"),
        (lambda loss: 3.0, TypeError, r"the step returned a float"),
        (lambda loss: loss.expand(4), ValueError, r"a tensor of shape \(4,\), .* return its \.mean\(\) or \.sum\(\)"),
        (lambda loss: loss.detach(), ValueError, r"depends on no parameter \(it was detached, or made under no_grad\)"),
    ],
)
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_a_step_without_a_loss_is_told(returned: Any, error: type[Exception], text: str, target: str) -> None:
    with pytest.raises(error, match=text):
        autobalance.profile(make(), ROWS, step=lambda model, rows: returned(model(rows).sum()), target=target)


def test_a_frozen_model_has_no_backward() -> None:
    frozen = make().requires_grad_(False)
    with pytest.raises(ValueError, match=r"no parameter of the model requires gradients\), .* say training=False"):
        autobalance.profile(frozen, ROWS)
    with pytest.raises(ValueError, match=r"the optimizer has nothing to do: leave optimizer= out"):
        autobalance.profile(frozen, ROWS, optimizer=torch.optim.AdamW)
    assert autobalance.profile(frozen, ROWS, training=False).peak() > 0


def test_an_optimizer_is_a_function_of_parameters() -> None:
    model = make()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong: list[tuple[Any, str]] = [
        (made, r"optimizer is an? SGD that is made already, .*give the class, torch\.optim\.SGD"),
        ("AdamW", r"optimizer='AdamW' cannot be called"),
        (lambda parameters: None, r"optimizer= returned None: it must return a torch\.optim\.Optimizer"),
        (torch.optim.LBFGS, r"LBFGS\.step needs a closure"),
    ]
    for optimizer, text in wrong:
        with pytest.raises(TypeError, match=text):
            autobalance.profile(model, ROWS, optimizer=optimizer)
    with pytest.raises(TypeError, match=r"step='training_step' cannot be called"):
        autobalance.profile(model, ROWS, step="training_step")  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_an_optimizer_of_the_users_own_parameters_would_count_nothing(target: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=r"for other parameters than those it was called with"):
        autobalance.profile(model, ROWS, optimizer=lambda _: torch.optim.AdamW(model.parameters()), target=target)


@pytest.mark.parametrize("options", [{"target": 3}, {"clip": "1"}, {"selected": "half"}])
def test_options_of_another_kind_are_refused_in_words(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}={options[name]!r}"):
        autobalance.profile(make(), ROWS, **options)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(8, 8), nn.Linear(8, 2)

    def forward(self, packed: PackedSequence) -> Tensor:
        output, _ = self.recurrent(packed)
        logits: Tensor = self.head(output.data)
        return logits


def test_a_packed_sequence_is_one_argument() -> None:
    packed = pack_sequence([torch.randn(rows, 8) for rows in (5, 3)])
    assert autobalance.profile(Packed(), packed).names == ("recurrent", "head")


def test_a_model_that_is_split_already_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8).to("simulated:0"), nn.Linear(8, 8).to("simulated:1"))
    with pytest.raises(ValueError, match="the model is on simulated:0, simulated:1 already: profile it before"):
        autobalance.profile(model, torch.ones(2, 8))
