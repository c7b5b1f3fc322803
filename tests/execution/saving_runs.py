"""Plans whose blocks save memory, forecast and run on simulated devices, beside the same model that saves none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from models import CASES
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import autobalance
from autobalance.blocks import find_blocks
from autobalance.execution.running import running_of
from autobalance.execution.savings.host_optimizer import host_parameters, on_host
from autobalance.partitioning.plan import Plan
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch, PlainTrial

WIDTH = 16

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


def loss_of(model: Any, batch: Any) -> Tensor:
    """What the model says."""
    loss: Tensor = model.loss(batch)
    return loss


def case_of(name: str, **options: Any) -> Case:
    """Trains one of the small models that other tests train.

    Args:
        name: of the case.
        options: further fields of the case here.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = CASES[name].make(nn.Module)
        return model

    return Case(make, CASES[name].batches(3), lambda model, batch: model.training_step(batch, 0), **options)


class Chain(nn.Module):
    """Blocks `a` and `b`, of any kind, and a loss."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def self_balance(self) -> list[Any]:
        return [self.a, self.b]

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))

    def loss(self, x: Any) -> Tensor:
        loss: Tensor = self(x).square().mean()
        return loss


def deep() -> nn.Module:
    """A block that saves more than it is given."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


class Checkpointing(nn.Module):
    """Keeps little by itself already, in part of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = deep(), deep()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


def chain(a: Make = deep, b: Make = deep, **options: Any) -> Case:
    """Trains a chain of two blocks.

    Args:
        a: makes the first.
        b: makes the second.
        options: further fields of the case.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Chain(a(), b())

    generator = torch.Generator().manual_seed(3)
    return Case(make, [torch.randn(8, WIDTH, generator=generator) for _ in range(3)], loss_of, **options)
