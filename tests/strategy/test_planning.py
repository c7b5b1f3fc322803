"""A plan is searched again until a trial of its placement keeps the budgets, and errors say what would help."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import autobalance
from autobalance.devices.device import Device
from autobalance.devices.links import link_between
from autobalance.errors import InfeasiblePlanError
from autobalance.execution.running import Running
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Forecast
from autobalance.strategy.options import Options
from autobalance.strategy.placed import Placed
from autobalance.strategy.planning import planning
from autobalance.strategy.planning.best_plan import planned_devices
from autobalance.strategy.planning.checked import ATTEMPTS, checked_plan


class Trials:
    """Stands for a profiler: the forecast of a placement is what its blocks weigh, and `extra` bytes on device 0."""

    def __init__(self, static: Sequence[int], extra: int) -> None:
        self.profile = Profile.from_costs(static=static)
        self._static = static
        self._extra = extra
        self.tried: list[tuple[int, ...]] = []

    def forecast(
        self,
        names: Sequence[str],
        assignment: Sequence[int],
        loose: Mapping[str, int],
        root: int,
        devices: int,
        running: Running,
    ) -> list[Forecast]:
        self.tried.append(tuple(assignment))
        peaks = [0] * devices
        for size, device in zip(self._static, assignment, strict=True):
            peaks[device] += size
        peaks[0] += self._extra
        return [Forecast(peak, "step 2 backward") for peak in peaks]


def search(trials: Trials, budgets: Sequence[int]) -> Any:
    devices = [Device(f"device {index}", budget) for index, budget in enumerate(budgets)]
    return checked_plan(trials, trials.profile, devices, Options())  # type: ignore[arg-type]  # all that it calls


def test_a_plan_that_its_trial_confirms_is_taken() -> None:
    trials = Trials([4, 4, 4, 4], extra=0)
    plan = search(trials, [10, 10])
    assert plan.assignment == (0, 0, 1, 1)
    assert plan.peaks == (8, 8)
    assert trials.tried == [(0, 0, 1, 1)]
    assert plan.notes[-1] == "the highest use is reached in: step 2 backward (device 0)"


def test_what_a_trial_finds_is_held_against_the_next_search() -> None:
    trials = Trials([4, 4, 4, 4], extra=4)
    plan = search(trials, [10, 12])
    assert trials.tried == [(0, 0, 1, 1), (0, 1, 1, 1)]
    assert plan.assignment == (0, 1, 1, 1)
    assert plan.peaks == (8, 12)


def test_no_plan_is_given_that_its_trial_does_not_confirm() -> None:
    trials = Trials([4, 4, 4, 4], extra=4)
    with pytest.raises(InfeasiblePlanError):
        search(trials, [9, 9])
    assert 1 <= len(trials.tried) <= ATTEMPTS


def test_devices_have_the_memory_that_is_free() -> None:
    with autobalance.simulate("2x1MiB"):
        held = torch.ones(1024, device="simulated:1")
        first, second = planned_devices([torch.device("simulated", 0), torch.device("simulated", 1)])
        assert (first.name, first.capacity) == ("simulated:0", 2**20)
        assert second.capacity == 2**20 - held.numel() * 4
    shares = planned_devices([torch.device("cpu")] * 4)
    assert [device.name for device in shares] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert 0 < sum(device.capacity for device in shares) <= psutil.virtual_memory().total


def test_simulated_devices_are_planned_as_fast_as_their_clock_takes_them() -> None:
    slow = Device("slow", 2**30, flops=1e9, bandwidth=1e8, launch_time=1e-3, links=(("fast", 1e7),))
    fast = Device("fast", 2**30, flops=1e12, links=(("slow", 1e7),))
    with autobalance.simulate([slow, fast]):
        planned = planned_devices([torch.device("simulated", 1), torch.device("simulated", 0)])
    assert [device.name for device in planned] == ["simulated:1", "simulated:0"]
    assert [device.flops for device in planned] == [1e12, 1e9]
    assert (planned[1].bandwidth, planned[1].launch_time) == (1e8, 1e-3)
    assert link_between(*planned) == 1e7


@pytest.mark.parametrize(
    ("interactive", "devices", "gpus", "is_said"),
    [(True, 1, 4, True), (False, 1, 4, False), (True, 1, 1, False), (True, 2, 4, False)],
)
def test_a_notebook_that_takes_one_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, interactive: bool, devices: int, gpus: int, is_said: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delattr(sys, "ps1", raising=False)
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    error = InfeasiblePlanError("too little.", need=(2,), budget=(1,), largest_block="head")
    noted = planning._with_note_on_notebooks(error, [torch.device("cuda", 0)] * devices)
    assert ("In a notebook Trainer(devices='auto') takes one GPU of 4: set devices=4." in str(noted)) == is_said
    assert (noted.shortfall, noted.largest_block) == ((1,), "head")


def test_a_plan_covers_the_same_model_in_runs_that_need_no_more() -> None:
    model, plan = nn.Linear(2, 2), search(Trials([4, 4], extra=0), [8, 8])
    trained = Placed(weakref.ref(model), plan, training=True, elements=100)
    assert trained.covers(model, training=True, elements=100)
    assert trained.covers(model, training=False, elements=50)
    assert not trained.covers(model, training=True, elements=101)
    assert not trained.covers(nn.Linear(2, 2), training=True, elements=1)
    assert not Placed(weakref.ref(model), plan, training=False, elements=100).covers(model, True, 1)
    assert Placed(weakref.ref(model), plan, training=True, elements=None).covers(model, True, 10**9)
