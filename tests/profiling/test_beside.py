"""What a step uses beside the model is said not to be counted."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import autobalance
from autobalance.profiling.beside import beside

TEACHER = nn.Linear(1024, 256, bias=False)


def distilled(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) - TEACHER(batch.cpu()).sum().item()).sum()
    return loss


def with_module(model: nn.Module, batch: Tensor, *, module: nn.Module) -> Tensor:
    loss: Tensor = module(model(batch)).sum()
    return loss


def test_an_average_beside_the_model_is_named_with_its_bytes_and_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    average = swa_utils.AveragedModel(model)

    def step(model: nn.Module, batch: Tensor) -> Any:
        average.update_parameters(model)
        return model(batch).sum()

    notes = autobalance.profile(model, torch.zeros(2, 512), step=step, target="simulated").notes
    assert (
        "not counted: the step uses AveragedModel (1.00 MiB), which is no part of the model: its tensors stay where "
        "they are, and what the step does to them is done; make it an attribute of the model, and it is placed and "
        "counted with it"
    ) in notes


def test_modules_are_found_among_globals_and_arguments_that_are_bound() -> None:
    model = nn.Linear(1024, 256)
    assert "Linear (1.00 MiB)" in next(beside(model, distilled))
    assert "BatchNorm1d" in next(beside(model, partial(with_module, module=nn.BatchNorm1d(256))))


net = nn.Linear(8, 8)


def test_an_attribute_of_the_name_of_a_global_is_not_it() -> None:
    assert not [*beside(nn.Linear(4, 4), lambda model, batch: model.net(batch))]
    assert "Linear" in next(beside(nn.Linear(4, 4), lambda model, batch: net(batch)))


def test_parts_of_the_model_and_modules_without_tensors_are_no_matter() -> None:
    model, loss = nn.Sequential(nn.Linear(4, 4)), nn.MSELoss()
    assert not [*beside(model, lambda _, batch: loss(model[0](batch), batch))]
    assert not [*beside(model, None)]
    assert not [*beside(model, max)]
