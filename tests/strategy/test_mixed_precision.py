"""Micro-batches in mixed precision train as plain Lightning does on the CPU, steps included that a scaler skips."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.split_runs import (
    WAYS,
    Fitted,
    compare,
    data,
    fit_alone,
    fit_split,
    in_turn,
    make,
    strategy_of,
)

pytestmark = pytest.mark.usefixtures("simulated")


def fit_both(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    schedule: str,
    precision: str,
    way: str = "micro-batches",
    model: Callable[[], Any] | None = None,
    callbacks: Callable[[], list[Any]] = list,
) -> tuple[Fitted, Fitted]:
    """The same fit split and in plain Lightning, which takes 16-mixed on the CPU only from a plugin, compared."""
    micro_batches, options, size = WAYS[way]
    options = {"max_epochs": 2, "gradient_clip_val": 0.5, **options}
    loaders, model = [data(32, size), data()], model or (lambda: make(lightning))
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    plugin = lightning.plugins.MixedPrecision(precision, "cpu", scaler)
    alone = fit_alone(lightning, trainer, model(), loaders, plugins=[plugin], callbacks=callbacks(), **options)
    split = fit_split(
        lightning,
        trainer,
        model(),
        loaders,
        strategy_of(lightning, schedule, micro_batches),
        precision=precision,
        callbacks=callbacks(),
        **options,
    )
    compare(split, alone, rtol=2e-2, atol=2e-3)
    if scaler is not None:
        assert split.trainer.precision_plugin.scaler.state_dict() == scaler.state_dict()
    return split, alone


@in_turn("precision", "16-mixed", "bf16-mixed")
def test_losses_and_weights_are_those_of_the_unsplit_model(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, precision: str
) -> None:
    fit_both(lightning, trainer, schedule, precision)


@in_turn("way", "a window", "micro-batches")
def test_a_step_is_skipped_where_one_part_overflows_on_one_device(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, way: str
) -> None:
    overflows = data(32).dataset[13][0]  # in the second step

    def loss(self: Any, batch: Any) -> Tensor:
        made: Tensor = type(self).__mro__[1].loss(self, batch)
        weight, is_there = self.layers[2][0].weight, (batch[0] == overflows.to(batch[0].device)).all(dim=1).any()
        return made + 1e36 * is_there.float() * (weight - weight.detach()).sum()

    class Noting(lightning.Callback):  # type: ignore[misc, name-defined]
        """Weights and scales between optimizer steps, and which gradients are finite before each."""

        def __init__(self) -> None:
            self.weights: list[list[Tensor]] = []
            self.told: list[Any] = []

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.told.append([bool(parameter.grad.isfinite().all()) for parameter in module.parameters()])

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            self.weights.append([parameter.detach().cpu().clone() for parameter in module.parameters()])
            self.told.append((trainer.global_step, trainer.precision_plugin.scaler.get_scale()))

    notes: list[Noting] = []

    def noting() -> list[Any]:
        notes.append(Noting())
        return [notes[-1]]

    fit_both(lightning, trainer, schedule, "16-mixed", way, lambda: make(lightning, loss=loss), noting)
    plain, split = notes
    assert split.told == plain.told
    batches = len(plain.weights) // 8  # of one step
    for index in range(0, len(plain.weights), batches):
        is_skipped = index // batches % 4 == 1
        before, after = (split.weights[max(at, 0)] for at in (index - 1, index + batches - 1))
        assert all(map(torch.equal, before, after)) == (is_skipped or (index == 0 and batches == 1))
