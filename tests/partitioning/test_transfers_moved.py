"""What a step really copies between devices, counted operation by operation, against what its profile foretells."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from models import CalledTwice, Gpt, ManyArguments, ResidualsAcrossBlocks, SumOfBranches, tokens, vectors
from torch import nn

import autobalance
from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.transfers import bytes_moved, crossings_of
from autobalance.profiling.profile import Profile
from autobalance.simulated import SimulatedTensor, observing

DEVICES = 3


def _plan(profile: Profile, assignment: list[int], root: int) -> Plan:
    return Plan(
        assignment=tuple(assignment),
        blocks=profile.blocks,
        devices=tuple(Device(f"device {index}", 2**40) for index in range(DEVICES)),
        budgets=(2**40,) * DEVICES,
        peaks=(0,) * DEVICES,
        root=root,
        policy="balanced",
        loose=profile.loose,
    )


def _copied(model: nn.Module, batch: Any, *, training: bool) -> dict[tuple[int, int], int]:
    """Bytes by (device they leave, device they reach) of a step."""
    moved: dict[tuple[int, int], int] = {}

    def observe(func: Any, args: Any, kwargs: Any, result: Any, account: int | None) -> None:
        source = args[1] if func.name().startswith("aten::copy_") else args[0]
        if "copy" not in func.name() or not isinstance(source, SimulatedTensor) or source.device == result.device:
            return
        pair = source.device.index, result.device.index
        moved[pair] = moved.get(pair, 0) + source.numel() * source.element_size()

    with torch.set_grad_enabled(training), observing(observe):
        loss = model.loss(batch)
        if training:
            loss.backward()
    return moved


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("body", [ResidualsAcrossBlocks, SumOfBranches, CalledTwice, Gpt, ManyArguments])
def test_a_step_copies_between_devices_what_its_profile_foretells(body: type[nn.Module], training: bool) -> None:
    class Model(body):  # type: ignore[misc, valid-type]
        def self_balance(self) -> list[str]:
            return list(self.block_names)

    class WithLoss(Model):
        def forward_methods(self) -> dict[str, list[str]]:
            return {"": ["loss"]}

    batch = (tokens if body is Gpt else vectors)(torch.Generator())
    with autobalance.simulate(DEVICES):
        profile = autobalance.profile(Model(), batch, step=lambda model, batch: model.loss(batch), training=training)
        crossings, rng = crossings_of(profile), random.Random(0)
        for _ in range(4):
            assignment, root = [rng.randrange(DEVICES) for _ in profile.blocks], rng.randrange(DEVICES)
            model = autobalance.dispatch(WithLoss(), _plan(profile, assignment, root))
            assert _copied(model, batch, training=training) == bytes_moved(crossings, assignment, root)
