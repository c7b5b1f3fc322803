"""How long a step of a large model takes on the clock of simulated devices, from a trace of its placement on fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from large_models import LARGE
from torch import Tensor, nn

import autobalance
from autobalance import Plan, Profile
from autobalance.blocks import find_blocks
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.running import Running, running_of
from autobalance.kernels.target import find_target
from autobalance.placement.contents import tensors_in
from autobalance.placement.ready import ready
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch, Glue, Mark, PlainTrial
from autobalance.simulated.clock import timing_traces

TARGET = "A100-80GB"
PRECISION = "bf16-mixed"


@dataclass(frozen=True)
class Clocked:
    """Seconds of one step.

    Attributes:
        passes: forwards and backwards.
        update: the optimizer's.
    """

    passes: float
    update: float


class ClockedTrial(PlainTrial):
    """Trial of a plain module, in micro-batches where the plan has them, that reads the clock in its second step.

    Args:
        step: of the model, on a batch that is a mapping of tensors.
    """

    def __init__(self, step: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__(torch.optim.AdamW, step, PRECISION)
        self.clocked: Clocked | None = None
        self._pipeline: Pipeline | None = None
        self._parts = 1

    def split(self, pipeline: Pipeline, running: Running) -> None:
        """From now on run batches in micro-batches."""
        self._pipeline, self._parts = pipeline, running.micro_batches

    def run(self, twin: nn.Module, batch: Batch, glue: Glue, mark: Mark) -> None:
        """Two training steps, the second on the clock."""
        simulated = torch.get_device_module("simulated")
        for _ in range(self.STEPS):
            moved = self._moved(batch.data)
            for parameter in twin.parameters():
                parameter.grad = None
            simulated.reset_clock()
            mark("passes")
            self._passes(twin, moved, glue)
            passes = simulated.elapsed()
            for index in range(simulated.device_count()):
                simulated.synchronize(index)
            self._update(twin)
            self.clocked = Clocked(passes, simulated.elapsed() - passes)

    def _passes(self, twin: nn.Module, batch: Any, glue: Glue) -> None:
        chunks = {name: value.chunk(self._parts) for name, value in batch.items()}
        losses: dict[int, Tensor] = {}

        def forward(number: int) -> None:
            with glue(), self._precise():
                part = {name: values[number] for name, values in chunks.items()}
                losses[number] = self._step(twin, part) / self._parts

        def backward(numbers: Sequence[int]) -> None:
            with glue():
                torch.stack([losses.pop(number) for number in numbers]).sum().backward()

        if self._pipeline is not None:
            with ready(tensors_in(chunks)):
                self._pipeline.train(self._parts, forward, backward)
        else:
            forward(0)
            backward((0,))


def traced_profile(name: str, samples: int) -> Profile:
    """The profile of a large model's training step.

    Args:
        name: of the model.
        samples: in the batch.
    """
    large = LARGE[name]
    return autobalance.profile(
        large.build("training"),
        large.batch(samples),
        optimizer=torch.optim.AdamW,
        precision=PRECISION,
        step=large.step,
        target=TARGET,
        scalable=True,
    )


def plan_of(profile: Profile, samples: int, devices: int, schedule: str, micro_batches: int) -> Plan:
    """The fastest plan, on devices with more memory than any model needs.

    Args:
        profile: of the model.
        samples: in the batch.
        devices: how many.
        schedule, micro_batches: of the plan.
    """
    return autobalance.plan(
        profile if samples == profile.batch_size else profile.scaled(samples),
        [2**42] * devices,
        schedule=schedule,
        micro_batches=micro_batches,
        recompute=False,
        cache=False,
    )


def clocked_step(name: str, plan: Plan, samples: int) -> Clocked:
    """Seconds of the step of a large model under a plan.

    Args:
        name: of the model.
        plan: of the step; its devices say how fast they are.
        samples: in the batch.
    """
    large = LARGE[name]
    module = large.build("training")
    trial = ClockedTrial(large.step)
    data = Batch("train batch", "train", large.batch(samples))
    profiler = Profiler(module, find_blocks(module), trial, [data], target=find_target(TARGET))
    with autobalance.simulate(plan.devices), timing_traces():
        profiler.forecast(
            plan.block_names, plan.assignment, plan.loose_map, plan.root, len(plan.devices), running_of(plan)
        )
    assert trial.clocked is not None, "the trial has run"
    return trial.clocked
