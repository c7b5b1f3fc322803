"""Peaks forecast on fakes equal those counted in a real run on simulated devices, to the byte, on every device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autobalance.partitioning.replay import replay
from autobalance.simulated import simulate
from tests.models import CASES, WIDTH, Case, Chain, vectors
from tests.profiling.running import (
    DEVICES,
    MakeOptimizer,
    Spot,
    contiguous,
    counted,
    forecast,
    profiler_of,
    scattered,
    train,
)

KIB = 1024
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "SGD for-loop": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
}


class Checkpointed(nn.Module):
    """Recomputes a block in backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=self.reentrant)


def recompute_layers(reentrant: bool, model: Any) -> Any:
    for index, layer in enumerate(model.layers):
        model.layers[index] = Checkpointed(layer, reentrant)
    return model


def unchanged(model: Any) -> Any:
    return model


@dataclass(frozen=True)
class Run:
    """How a model is trained."""

    name: str
    optimizer: str = "AdamW foreach"
    precision: str = "32-true"
    adapt: Callable[[Any], Any] = unchanged


RUNS: dict[str, Run] = {
    **{f"{name}, AdamW foreach": Run(name) for name in CASES},
    **{f"{name}, SGD for-loop": Run(name, optimizer="SGD for-loop") for name in CASES},
    **{f"{name}, bf16-mixed": Run(name, precision="bf16-mixed") for name in CASES},
    "gpt, checkpoint": Run("gpt", adapt=partial(recompute_layers, False)),
    "gpt, reentrant checkpoint": Run("gpt", adapt=partial(recompute_layers, True)),
    "gpt, checkpoint under autocast": Run("gpt", precision="bf16-mixed", adapt=partial(recompute_layers, False)),
}


@pytest.mark.parametrize("name", RUNS)
def test_forecast_equals_count_for_any_placement(name: str) -> None:
    run = RUNS[name]
    case, make = CASES[run.name], OPTIMIZERS[run.optimizer]
    profiler = profiler_of(case, make, run.precision, run.adapt)
    profile = profiler.profile()
    assert profiler.notes == [], "the trial is expected to run on fakes"
    for where in (contiguous(profile), scattered(profile, 1), scattered(profile, 2)):
        assert forecast(profiler, where) == counted(case, make, where, run.precision, run.adapt), where.assignment


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_replay_equals_the_forecast(name: str, optimizer: str) -> None:
    profiler = profiler_of(CASES[name], OPTIMIZERS[optimizer])
    profile = profiler.profile()
    for where in (contiguous(profile), *(scattered(profile, seed) for seed in range(3))):
        assert replay(profile.timeline, where.assignment, where.root, DEVICES) == forecast(profiler, where)


class PartsOnTheWay(Chain):
    """Halves of a tensor, and the tensor itself, go to different blocks; their gradients are parts of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x).chunk(2, 1)
        both = torch.cat([torch.tanh(first), self.b(torch.cat([second, first], 1))], 1)
        kept = both[:, : 2 * WIDTH // 2]
        return self.d(self.c(kept) + kept)


@pytest.mark.parametrize("seed", range(12))
def test_replay_knows_where_a_part_is_a_view_of_the_whole(seed: int) -> None:
    profiler = profiler_of(Case(PartsOnTheWay, vectors), OPTIMIZERS["AdamW foreach"])
    profile = profiler.profile()
    where = scattered(profile, seed)
    assert replay(profile.timeline, where.assignment, where.root, DEVICES) == forecast(profiler, where)


@pytest.mark.parametrize("name", CASES)
def test_run_fits_in_exactly_what_was_forecast_and_in_no_kibibyte_less(name: str) -> None:
    case, make = CASES[name], OPTIMIZERS["AdamW foreach"]
    profiler = profiler_of(case, make)
    where = contiguous(profiler.profile())
    capacities = [max(KIB, peak) for peak in forecast(profiler, where)]
    run_within(capacities, case, make, where)
    for device in set(where.assignment):
        smaller = [capacity - KIB * (index == device) for index, capacity in enumerate(capacities)]
        with pytest.raises(torch.OutOfMemoryError, match=f"simulated:{device} out of memory"):
            run_within(smaller, case, make, where)


def run_within(capacities: list[int], case: Case, make: MakeOptimizer, where: Spot) -> None:
    gc.collect()  # what an earlier run, or its error, still holds would count
    devices = [torch.device("simulated", index) for index in range(DEVICES)]
    with simulate(capacities):
        assert [torch.simulated.memory_allocated(device) for device in devices] == [0] * DEVICES
        train(case.make(nn.Module), case.batches(3), make, where, devices)
