"""Batches that run out of memory in parts, or are parted since: the run goes on as under its last plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from faults import Allocations, shrink, watch_allocations
from models import loader
from threads import no_thread_left
from torch import Tensor, nn

import autobalance

WIDTH, PARTS, STEPS = 16, 8, 3


@dataclass
class Ran:
    """What a run leaves, and between which allocations its steps were."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    plan: Any = None
    first: int = 0
    last: int = 0


def run(lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, plan: Any = None) -> Ran:
    """Train a chain of blocks with dropout in eight micro-batches."""
    ran = Ran()

    class Chain(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(6))

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            with allocations.counting():
                for layer in self.layers:
                    batch = torch.tanh(layer(batch))
                return batch.square().mean()

        def backward(self, *args: Any, **kwargs: Any) -> None:
            with allocations.counting():
                super().backward(*args, **kwargs)

        def on_train_start(self) -> None:
            ran.first = allocations.count + 1  # what trials and tests of pairs allocate is none of the steps'

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            ran.losses.append(float(outputs["loss"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    drawn = torch.Generator().manual_seed(1)
    data = loader([torch.randn(2 * PARTS, WIDTH, generator=drawn) for _ in range(STEPS)])
    torch.manual_seed(0)
    model, allocations.count = Chain(), 0
    options = {"micro_batches": PARTS, "schedule": "1f1b"} if plan is None else {"plan": plan}
    made = trainer(strategy=autobalance.SelfBalanceStrategy(**options))
    with no_thread_left():
        made.fit(model, data)
    ran.plan, ran.last, ran.weights = made.strategy.plan, allocations.count, model.state_dict()
    assert (ran.plan.micro_batches, ran.plan.schedule) == (PARTS, "1f1b")
    return ran


UNDISTURBED: dict[str, Ran] = {}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("which", range(4))
def test_a_device_that_shrinks_with_micro_batches_in_flight_gives_its_blocks_to_others(
    lightning: ModuleType, trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    allocations = watch_allocations(monkeypatch)
    if lightning.__name__ not in UNDISTURBED:
        run(lightning, trainer, allocations)  # what is done once in a process allocates as well
        UNDISTURBED[lightning.__name__] = run(lightning, trainer, allocations)
    before = UNDISTURBED[lightning.__name__]
    number = random.Random(f"in flight {which}").randint(before.first, before.last)

    def take_memory(account: int, nbytes: int) -> None:
        """Another process takes a fifth of what the device was planned to hold, or all that is not in use."""
        shrink(account, max(torch.simulated.memory_allocated(account), before.plan.peaks[account] * 8 // 10))
        raise torch.OutOfMemoryError(f"simulated:{account} out of memory. Tried to allocate {nbytes} bytes.")

    allocations.fails, allocations.on_failure = (lambda count: count == number), take_memory
    told = r"the plan was made again \(blocks? moves?: .* from device \d to \d"
    with (
        autobalance.simulate([4 * peak for peak in before.plan.peaks]),
        pytest.warns(UserWarning, match=told),
    ):
        found = run(lightning, trainer, allocations)
    assert allocations.failed == 1
    assert found.plan.assignment != before.plan.assignment
    allocations.fails = lambda count: False
    expected = run(lightning, trainer, allocations, found.plan)
    assert expected.plan.assignment == found.plan.assignment
    assert found.losses == expected.losses
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"schedule": "1f1b", "micro_batches": "auto"}, r"\(.*micro-batches instead of 1; \d blocks are recomputed"),
        ({"schedule": "gpipe", "micro_batches": 4}, r"\(\d blocks are recomputed instead of 0\)"),
    ],
    ids=["smaller micro-batches", "recomputation"],
)
def test_devices_that_all_shrink_run_smaller_parts_or_blocks_twice(
    lightning: ModuleType, trainer: Callable[..., Any], asked: dict[str, Any], told: str
) -> None:
    shrunk: list[int] = []

    class Wide(lightning.LightningModule):  # type: ignore[misc, name-defined]
        fails = False

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
                for _ in range(6)
            )
            self.losses: list[float] = []

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for index, layer in enumerate(self.layers):
                batch = layer(batch)
                if self.fails and batch_idx == 1 and index == 3 and not shrunk:
                    for device, peak in enumerate(self.trainer.strategy.plan.peaks):
                        shrunk.append(device)
                        shrink(device, peak * 8 // 10)
                    raise torch.OutOfMemoryError("simulated:1 out of memory. Tried to allocate 512 bytes.")
            return batch.square().mean()

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.fails = self.failing  # not before: the plan is made by trials of the same step

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def losses(failing: bool, **options: Any) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        drawn, model = torch.Generator().manual_seed(1), Wide()
        model.failing = failing
        made = trainer(strategy=autobalance.SelfBalanceStrategy(**options))
        made.fit(model, loader([torch.randn(256, WIDTH, generator=drawn) for _ in range(STEPS)]))
        return model.losses, made.strategy.plan

    with autobalance.simulate(4), pytest.warns(UserWarning, match=told):
        found, plan = losses(failing=True, recompute="auto", **asked)
    assert shrunk
    assert "recompute" in plan.saving
    assert plan.micro_batches > 1
    expected, again = losses(failing=False, plan=plan)
    assert (again.micro_batches, again.saving) == (plan.micro_batches, plan.saving)
    assert found == pytest.approx(expected, rel=1e-6)
