"""Plans with micro-batches say so where these cost more time than they save; costs are by hand, or of plans beside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autobalance
import autobalance.units
from autobalance.devices.device import Device
from autobalance.devices.roofline import Work
from autobalance.profiling.profile import Profile

PLAIN = Profile.from_costs([4] * 4, [1] * 4, forward_time=[1.0] * 4, backward_time=[2.0] * 4, batch_size=8)
DEVICES = [Device(f"gpu {index}", 100, launch_time=1.0) for index in range(4)]


def told(plan: autobalance.Plan, words: str) -> list[str]:
    return [line for line in plan.advice if words in line]


def launching(forward: int, backward: int) -> Profile:
    """Four blocks of nothing but launches, and one sample in a batch."""
    work = {"forward_work": (Work(launches=forward),), "backward_work": (Work(launches=backward),)}
    return replace(PLAIN, blocks=tuple(replace(row, **work) for row in PLAIN.blocks))


def test_a_step_that_the_host_launches_for_too_long_says_so() -> None:
    found = autobalance.plan(launching(10, 20), DEVICES, schedule="1f1b", micro_batches=8, accumulated=True)
    # Eight batches, each of which launches 4 x 30 kernels of a second; devices that did not wait would take 330 s.
    assert found.step_time == 960.0
    assert found.advice == (
        "the host decides how long this step takes: it launches 960 kernels in 960 s, and devices wait for it; larger "
        "batches would take no longer, and fewer micro-batches less time",
    )
    assert found.advice[0] in " ".join(str(found).split())


def test_a_pipeline_that_is_worth_it_says_nothing() -> None:
    found = autobalance.plan(PLAIN, DEVICES, schedule="1f1b", micro_batches=8)
    assert found.step_time < autobalance.plan(PLAIN, DEVICES, schedule="naive").step_time
    assert found.advice == ()


def test_whole_batches_have_nothing_to_lose_by_splitting() -> None:
    assert autobalance.plan(launching(10, 20), DEVICES, schedule="naive").advice == ()


@pytest.fixture(scope="module")
def small() -> Profile:
    """A batch whose parts take as long as the whole: every kernel is over before the next one is launched."""
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(8)])
    return autobalance.profile(model, torch.randn(32, 16), target="simulated", scalable=True)


@pytest.mark.parametrize("policy", ["auto", "balanced"])
def test_parts_that_take_longer_than_the_whole_say_so(small: Profile, policy: str) -> None:
    found = autobalance.plan(small, "4x1MiB", schedule="1f1b", micro_batches=8, policy=policy)
    whole = autobalance.score(small, found.device_map, "4x1MiB").step_time
    assert found.step_time > 7 * whole
    (line,) = told(found, "whole batches, one device at a time, fit as well")
    assert f"would take {autobalance.units.format_time(whole)}: micro-batches" in line
    assert len(told(found, "the host decides")) == 1


def test_whole_batches_that_do_not_fit_are_no_choice(small: Profile) -> None:
    found = autobalance.plan(small, "4x1MiB", schedule="1f1b", micro_batches=8)
    tight = autobalance.plan(small, list(found.peaks), schedule="1f1b", micro_batches=8)
    assert max(autobalance.score(small, tight.device_map, list(found.peaks)).uses) > 1
    assert not told(tight, "whole batches")
    assert told(tight, "the host decides")


class Residual(torch.nn.Module):
    """Sums outside the blocks, each on the device of its first operand."""

    def __init__(self, is_output_first: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.is_output_first = is_output_first

    def self_balance(self) -> list[torch.nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x) + x if self.is_output_first else x + layer(x)
        return x


@pytest.mark.parametrize(("is_output_first", "lines"), [(False, 1), (True, 0)])
def test_sums_that_bring_outputs_back_to_an_earlier_device_are_told(is_output_first: bool, lines: int) -> None:
    profile = autobalance.profile(
        Residual(is_output_first),
        torch.randn(32, 16),
        target="simulated",
        scalable=True,
    )
    found = autobalance.plan(profile, "2x1MiB", schedule="1f1b", micro_batches=4, policy="balanced")
    assert found.assignment == (0, 0, 1, 1)
    back = told(found, "goes back to device 0, where micro-batches wait for each other")
    assert len(back) == lines
    assert all(line.startswith("what 'layers.2' returns goes back") for line in back)
    assert not told(autobalance.plan(profile, "2x1MiB", schedule="naive", policy="balanced"), "goes back")
