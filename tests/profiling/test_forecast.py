"""Peaks forecast on fakes equal those counted in a real run on simulated devices, to the byte, on every device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autobalance.partitioning.replay import replay
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
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


@cache
def profiled(name: str) -> tuple[Profiler, Profile]:
    """A run's profiler, and the profile that all tests share."""
    run = RUNS[name]
    profiler = profiler_of(CASES[run.name], OPTIMIZERS[run.optimizer], run.precision, run.adapt)
    return profiler, profiler.profile()


@cache
def foreseen(name: str, seed: int | None = None) -> tuple[Spot, list[int]]:
    """Blocks of a run in call order, or scattered, and the peaks forecast for that."""
    profiler, profile = profiled(name)
    where = contiguous(profile) if seed is None else scattered(profile, seed)
    return where, forecast(profiler, where)


@pytest.mark.parametrize("name", RUNS)
def test_forecast_equals_count_for_any_placement(name: str) -> None:
    run = RUNS[name]
    case, make = CASES[run.name], OPTIMIZERS[run.optimizer]
    assert profiled(name)[0].notes == [], "the trial is expected to run on fakes"
    for seed in (None, 1, 2):
        where, peaks = foreseen(name, seed)
        assert peaks == counted(case, make, where, run.precision, run.adapt), where.assignment


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_replay_equals_the_forecast(name: str, optimizer: str) -> None:
    run = f"{name}, {optimizer}"
    for seed in (None, 0, 1, 2):
        where, peaks = foreseen(run, seed)
        assert replay(profiled(run)[1].timeline, where.assignment, where.root, DEVICES) == peaks


class PartsOnTheWay(Chain):
    """Halves of a tensor, and the tensor itself, go to different blocks; their gradients are parts of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x).chunk(2, 1)
        both = torch.cat([torch.tanh(first), self.b(torch.cat([second, first], 1))], 1)
        kept = both[:, : 2 * WIDTH // 2]
        return self.d(self.c(kept) + kept)


def test_replay_knows_where_a_part_is_a_view_of_the_whole() -> None:
    profiler = profiler_of(Case(PartsOnTheWay, vectors), OPTIMIZERS["AdamW foreach"])
    profile = profiler.profile()
    for seed in range(12):
        where = scattered(profile, seed)
        assert replay(profile.timeline, where.assignment, where.root, DEVICES) == forecast(profiler, where), seed


@pytest.mark.parametrize("name", CASES)
def test_run_fits_in_exactly_what_was_forecast_and_in_no_kibibyte_less(name: str) -> None:
    case, make = CASES[name], OPTIMIZERS["AdamW foreach"]
    where, peaks = foreseen(f"{name}, AdamW foreach")
    capacities = [max(KIB, peak) for peak in peaks]
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
