"""Runs a plain module under a placement on simulated devices, and forecasts the same run."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autobalance.blocks import find_blocks
from autobalance.placement.host_locator import HostLocator
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator
from autobalance.placement.move import Mover
from autobalance.placement.place import place
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.timeline import ROOT
from autobalance.profiling.trial import Batch, PlainTrial
from tests.models import Case

DEVICES = 4
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def training_step(model: Any, batch: Any) -> torch.Tensor:
    """The step of every model of tests/models.py."""
    loss: torch.Tensor = model.training_step(batch, 0)
    return loss


@dataclass(frozen=True)
class Spot:
    """Where everything is: device index per block in call order, of loose tensors by name, and of batch and loss."""

    names: tuple[str, ...]
    assignment: tuple[int, ...]
    loose: dict[str, int]
    root: int


def profiler_of(
    case: Case,
    make_optimizer: MakeOptimizer,
    precision: str = "32-true",
    adapt: Callable[[Any], Any] = lambda model: model,
) -> Profiler:
    """Profiles a fresh model of `case`; `adapt` may change the model first."""
    model = adapt(case.make(nn.Module))
    trial = PlainTrial(make_optimizer, training_step, precision)
    return Profiler(model, find_blocks(model), trial, [Batch("train batch", "train", case.batches(1)[0])])


def contiguous(profile: Profile, *, parts: int = DEVICES) -> Spot:
    """Blocks in call order, about as many on each of the first `parts` devices."""
    count = len(profile.blocks)
    return spot(profile, [index * parts // count for index in range(count)])


def scattered(profile: Profile, seed: int) -> Spot:
    """Blocks anywhere."""
    draw = random.Random(seed)
    return spot(profile, [draw.randrange(DEVICES) for _ in profile.blocks])


def spot(profile: Profile, assignment: list[int]) -> Spot:
    """The assignment, with blocks that must share a device on that of the first of them."""
    for group in profile.together:
        for block in group:
            assignment[block] = assignment[group[0]]
    root = assignment[-1]
    loose = {name: root if owner == ROOT else assignment[owner] for name, owner in profile.loose}
    return Spot(tuple(block.name for block in profile.blocks), tuple(assignment), loose, root)


def forecast(profiler: Profiler, where: Spot) -> list[int]:
    """Peak bytes per device, before anything is allocated there."""
    found = profiler.forecast(where.names, where.assignment, where.loose, where.root, DEVICES)
    return [device.peak for device in found]


def counted(
    case: Case,
    make_optimizer: MakeOptimizer,
    where: Spot,
    precision: str = "32-true",
    adapt: Callable[[Any], Any] = lambda model: model,
    steps: int = 3,
) -> list[int]:
    """Peak bytes per device of a loop over real batches."""
    model = adapt(case.make(nn.Module))
    devices = [torch.device("simulated", index) for index in range(DEVICES)]
    gc.collect()
    before = [torch.simulated.memory_allocated(device) for device in devices]
    for device in devices:
        torch.simulated.reset_peak_memory_stats(device)
    train(model, case.batches(steps), make_optimizer, where, devices, precision)
    return [torch.simulated.max_memory_allocated(device) - held for device, held in zip(devices, before, strict=True)]


def train(
    model: Any,
    batches: Sequence[Any],
    make_optimizer: MakeOptimizer,
    where: Spot,
    devices: Sequence[torch.device],
    precision: str = "32-true",
) -> None:
    """An ordinary loop: gradients dropped, forward, backward, step."""
    blocks = find_blocks(model).ordered(where.names)
    places = [devices[index] for index in where.assignment]
    loose = {name: devices[index] for name, index in where.loose.items()}
    place(model, blocks, places, loose, devices[where.root])
    glue = install(model, blocks, places, DeviceLocator(devices), None).glue
    optimizer = make_optimizer(model.parameters())
    for batch in batches:
        moved = Mover(HostLocator(), devices[where.root]).move(batch)
        optimizer.zero_grad()
        with glue(), torch.autocast("simulated", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = training_step(model, moved)
        with glue():
            loss.backward()
        optimizer.step()
