"""Plans whose blocks save memory, forecast and run on simulated devices, beside the same model that saves none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

import autobalance
from autobalance.blocks import find_blocks
from autobalance.execution.host_optimizer import host_parameters, on_host
from autobalance.execution.running import running_of
from autobalance.partitioning.plan import Plan
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch, PlainTrial

Make = Callable[[], nn.Module]
Loss = Callable[[Any, Any], Tensor]
Optimizers = Callable[[Any], torch.optim.Optimizer]
sgd: Optimizers = partial(torch.optim.SGD, lr=0.1, foreach=False)
adamw: Optimizers = partial(torch.optim.AdamW, lr=1e-2, foreach=False)


@dataclass(frozen=True)
class Case:
    """A model with the step that trains it, on two devices.

    Attributes:
        make: builds it, the same each time.
        batches: of the steps, the first for planning.
        loss: of model and batch.
        optimizer: of its parameters.
        precision: as Lightning names it.
    """

    make: Make
    batches: list[Any]
    loss: Loss
    optimizer: Optimizers = sgd
    precision: str = "32-true"

    def plan(self, **changes: Any) -> Plan:
        """A plan on two devices whose blocks keep what they save, but for `changes`."""
        options: Any = {"optimizer": self.optimizer, "step": self.loss, "precision": self.precision}
        profile = autobalance.profile(self.make(), self.batches[0], target="simulated", **options)
        made = autobalance.plan(profile, "2x1GiB", policy="balanced", schedule="naive", recompute=False)
        return replace(made, **changes)

    def forecast(self, plan: Plan) -> list[int]:
        """Peaks of a trace with the plan installed."""
        model = self.make()
        trial = PlainTrial(self.optimizer, self.loss, self.precision)
        profiler = Profiler(model, find_blocks(model), trial, [Batch("train batch", "train", self.batches[0])])
        given = plan.block_names, plan.assignment, plan.loose_map, plan.root, len(plan.devices), running_of(plan)
        return [device.peak for device in profiler.forecast(*given)]

    def run(self, plan: Plan, after: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None) -> Ran:
        """Train for as many steps as there are batches."""
        gc.collect()
        torch.manual_seed(1)
        model = autobalance.dispatch(self.make(), plan)
        root = torch.device("simulated", plan.root)
        optimizer = self.optimizer(model.parameters())
        on_host(optimizer, host_parameters(model, [torch.device("simulated", index) for index in plan.host_optimizer]))
        before = [torch.simulated.memory_allocated(index) for index in range(2)]
        for index in range(2):
            torch.simulated.reset_peak_memory_stats(index)
        losses, gradients = [], {}
        for batch in self.batches:
            batch = _pytree.tree_map(lambda value: value.to(root) if isinstance(value, Tensor) else value, batch)
            optimizer.zero_grad()
            with self._autocast():
                loss = self.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            gradients = {name: _numbers(value.grad) for name, value in model.named_parameters()}
        peaks = [torch.simulated.max_memory_allocated(index) for index in range(2)]
        if after is not None:
            after(model, optimizer)
        weights = {name: _numbers(value) for name, value in model.state_dict().items()}
        return Ran(losses, gradients, weights, peaks, before)

    def _autocast(self) -> Any:
        mixed = self.precision == "bf16-mixed"
        return torch.autocast("simulated", torch.bfloat16, enabled=mixed)


@dataclass(frozen=True)
class Ran:
    """What a run has come to; `peaks` are in bytes, `placed` what the weights take before the first step."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    peaks: list[int]
    placed: list[int]

    def assert_same(self, other: Ran) -> None:
        """To the last bit."""
        assert self.losses == other.losses
        for mine, theirs in ((self.gradients, other.gradients), (self.weights, other.weights)):
            assert mine.keys() == theirs.keys()
            different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
            assert not different


def _numbers(tensor: Tensor | None) -> Tensor:
    return torch.zeros(0) if tensor is None else tensor.detach().cpu()
