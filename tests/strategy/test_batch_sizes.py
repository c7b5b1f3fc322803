"""The profile of a run knows what parts of its batches take, as a run with such batches would find it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autobalance
from autobalance.profiling.profile import Profile
from autobalance.strategy.planning import best_plan
from autobalance.strategy.planning.batch_sizes import for_any_batch

pytestmark = pytest.mark.usefixtures("simulated")

WIDTH = 12


def make(lightning: ModuleType) -> Any:
    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

        def self_balance(self) -> list[nn.Module]:
            return list(self.layers)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layers(batch[0]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.layers(batch[0]).square().mean())

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layers(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    return Net()


def data(samples: int) -> Any:
    return DataLoader(TensorDataset(torch.ones(samples, WIDTH)), batch_size=samples)


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """Profiles of the runs of a test, for any batch."""
    found: list[Profile] = []
    checked = best_plan.checked_plan

    def keep(profiler: Any, profile: Profile, devices: Any, options: Any) -> Any:
        found.append(for_any_batch(profiler, profile))
        return checked(profiler, profile, devices, options)

    monkeypatch.setattr(best_plan, "checked_plan", keep)
    return found


@pytest.mark.parametrize(("whole", "part"), [((8, 6), (4, 3)), ((7, 9), (2, 9))], ids=["grows", "stays"])
def test_batches_that_are_evaluated_shrink_with_the_training_batch_where_they_can(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    profiles: list[Profile],
    whole: tuple[int, int],
    part: tuple[int, int],
) -> None:
    for training, evaluated in (whole, part):
        trainer().fit(make(lightning), data(training), data(evaluated))
    large, small = profiles
    assert large.is_scalable
    scaled = large.scaled(part[0])
    assert scaled.timeline.sizes == small.timeline.sizes
    assert scaled.peak() == small.peak()


def test_parts_of_batches_that_are_predicted(
    lightning: ModuleType, trainer: Callable[..., Any], profiles: list[Profile]
) -> None:
    for samples in (64, 16):
        trainer().predict(make(lightning), data(samples))
    large, small = profiles
    assert large.scaled(16).timeline.sizes == small.timeline.sizes
    plans = [
        autobalance.plan(large, [10**6] * 4, policy="sequential", schedule="gpipe", micro_batches=count)
        for count in (1, 4)
    ]
    # Of one part after the other, all results stay on the last device, and nothing else of the whole batch anywhere.
    activation = 64 * WIDTH * 4
    assert plans[1].assignment == plans[0].assignment == (0, 0, 0, 0)
    assert plans[0].peaks[0] - plans[1].peaks[0] >= activation // 2


def test_a_batch_whose_samples_are_not_known_is_planned_as_a_whole(
    lightning: ModuleType, trainer: Callable[..., Any], profiles: list[Profile]
) -> None:
    odd = DataLoader([(torch.ones(8, WIDTH), torch.ones(3))], batch_size=None)  # type: ignore[arg-type, var-annotated]
    trainer().fit(make(lightning), odd, data(4))
    (found,) = profiles
    assert not found.is_scalable
    assert found.notes[-1] == (
        "bytes as a function of the batch are not known: tensors of the batch have different first dimensions (3, 8), "
        "so how many samples it has is not known"
    )
