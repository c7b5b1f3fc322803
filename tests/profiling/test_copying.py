"""The trial's copy of a model shares nothing with it that the trial could change."""

from __future__ import annotations

import copy
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.profiling.copying import copy_module


def zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


class Holder:
    """An object of the user's that can be called, and holds a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor:
        return self.tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2), persistent=False)
        self.plain = torch.ones(3)
        self.nested = {"list": [self.plain, self.first], "holder": Holder(torch.ones(4))}
        self.method = self.forward
        self.partial = partial(self.forward, torch.ones(5))
        outside = torch.ones(6)
        self.closure = lambda: (outside, self)
        self.seen: list[Tensor] = []
        self.first.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.fixture
def pair() -> tuple[Model, Model]:
    model = Model()
    twin, shared = copy_module(model, zeros, {})
    assert isinstance(twin, Model)
    assert shared == []
    return model, twin


def test_every_tensor_is_replaced_and_ties_stay_ties(pair: tuple[Model, Model]) -> None:
    model, twin = pair
    assert twin.second.weight is twin.first.weight
    assert twin.first.weight is not model.first.weight
    assert isinstance(twin.first.weight, nn.Parameter)
    assert twin.nested["list"][0] is twin.plain
    replaced = (
        twin.first.weight,
        twin.scale,
        twin.plain,
        twin.nested["holder"](),
        twin.partial.args[0],
        twin.closure()[0],
    )
    assert [bool(tensor.any()) for tensor in replaced] == [False] * 6
    assert model.scale.tolist() == [1, 1]


def test_whatever_held_the_model_holds_its_copy(pair: tuple[Model, Model]) -> None:
    model, twin = pair
    assert twin.nested["list"][1] is twin.first
    assert twin.method.__self__ is twin
    assert twin.partial.func.__self__ is twin
    assert twin.closure()[1] is twin
    assert model.closure()[1] is model


def test_hook_of_the_copy_leaves_the_model_alone(pair: tuple[Model, Model]) -> None:
    model, twin = pair
    twin(torch.ones(1, 2))
    assert len(twin.seen) == 1
    assert model.seen == []
    assert len(model.first._forward_hooks) == len(twin.first._forward_hooks) == 1


def test_modes_and_requires_grad_are_kept() -> None:
    model = Model().eval()
    model.second.train()
    model.first.bias.requires_grad_(False)
    twin, _ = copy_module(model, zeros, {})
    assert [module.training for module in twin.modules()] == [module.training for module in model.modules()]
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]


def test_kept_loss_becomes_a_plain_tensor() -> None:
    model: Any = nn.Linear(2, 2)
    model.last_loss = model(torch.ones(1, 2)).sum()
    twin, shared = copy_module(model, zeros, {})
    assert shared == []
    assert twin.last_loss.grad_fn is None  # type: ignore[union-attr]  # an attribute of this test's
    assert model.last_loss.grad_fn is not None


def test_what_cannot_be_copied_is_shared_and_named(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))
    model.lock = threading.Lock()
    model[0].numbers = (number for number in range(3))
    with (tmp_path / "log").open("w") as model.file:
        twin, shared = copy_module(model, zeros, {})
    assert sorted(shared) == ["0.numbers", "file", "lock"]
    assert twin.lock is model.lock


def test_object_with_a_stand_in_is_replaced_wherever_it_is_held() -> None:
    model: Any = nn.Linear(2, 2)
    trainer, stand_in = Holder(torch.ones(1)), Holder(torch.zeros(1))
    model.trainer, model.others = trainer, [trainer]
    twin: Any = copy_module(model, zeros, {id(trainer): stand_in})[0]
    assert twin.trainer is twin.others[0] is stand_in
    assert trainer.tensor.tolist() == [1]


def test_model_on_meta_is_copied() -> None:
    twin, _ = copy_module(nn.Linear(10**6, 10**6, device="meta"), partial(torch.empty_like, device="meta"), {})
    assert next(twin.parameters()).is_meta


def test_copy_equals_a_deep_copy_where_a_deep_copy_works() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    twin, _ = copy_module(model, torch.clone, {})
    expected = copy.deepcopy(model)
    assert [(name, tensor.tolist()) for name, tensor in twin.state_dict().items()] == [
        (name, tensor.tolist()) for name, tensor in expected.state_dict().items()
    ]
