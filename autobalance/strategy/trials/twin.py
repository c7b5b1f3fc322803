"""The copy of a Trainer's module in a trial, and what its steps run with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autobalance import compat
from autobalance.execution.batch_norm import FEWEST_SAMPLES, DeferredBatchNorm
from autobalance.execution.batches.splitting import Parts, parts_of, weights
from autobalance.execution.equivalence.few_samples import slices
from autobalance.execution.pipeline import Pipeline
from autobalance.placement.contents import untouchable
from autobalance.profiling.trial import Batch
from autobalance.strategy.parts.recorded_logs import RecordedLogs
from autobalance.strategy.parts.room_for_test import FEWEST, run_forward
from autobalance.strategy.trials.logged import LoggedValues
from autobalance.strategy.trials.sending import sent
from autobalance.strategy.trials.stand_ins import TrialTrainer


@dataclass
class Twin:
    """A copy of the module, with a Trainer of its own.

    Attributes:
        module: the copy.
        real: the user's Trainer, which is only asked.
        trainer: stands for it.
        logged: what the copy's steps log.
        device: of batch and loss.
        takes_windows: whether the batches whose gradients are added up are one step, as its micro-batches.
        pipeline: runs micro-batches; None: batches stay whole.
        micro_batches: how many.
        norms: batch norms whose statistics are those of the whole batch; None: there are none.
    """

    module: Any
    real: Any
    trainer: TrialTrainer
    logged: LoggedValues
    device: torch.device
    takes_windows: bool
    pipeline: Pipeline | None = None
    micro_batches: int = 1
    norms: DeferredBatchNorm | None = None

    @property
    def precision_plugin(self) -> Any:
        """That of the copy."""
        return self.trainer.precision_plugin

    def moved(self, batch: Batch) -> Any:
        """What one step is given: the batch on the device; where nothing is split, of one in parts the largest."""
        if self.pipeline is None and batch.in_parts is not None:
            return sent(batch.in_parts.largest, self.device)
        data = self.precision_plugin.convert_input(untouchable(batch.data))
        return compat.transferred_batch(self.module, data, self.device, batch.loader)

    def parts(self, batch: Batch, moved: Any, *, trains: bool = False) -> Parts | None:
        """The parts of a batch as the run makes them; None where it stays whole.

        Args:
            batch: as the loader gives it.
            moved: on the device.
            trains: whether batch norms need samples of their own.
        """
        if self.pipeline is None or self.takes_windows:
            return None
        here = batch.in_parts
        if here is None:
            fewest = FEWEST_SAMPLES if trains and self.norms is not None and self.norms.has_any else 1
            parts = parts_of(self.module, moved, self.micro_batches, fewest=fewest)
        else:
            batches, sizes = sent(list(here.parts.batches), self.device, here.whole, moved), here.parts.sizes
            parts = Parts(batches, sizes, weights(batches, sizes, getattr(self.module, "loss_weight", None)))
        return parts if len(parts.sizes) > 1 else None

    def test(self, batch: Batch, moved: Any, parts: Parts, step: Callable[[Any], Any]) -> None:
        """What the test before a first batch needs where it takes more samples than a micro-batch has.

        Args:
            batch: as the loader gives it.
            moved: on the device.
            parts: of it.
            step: runs the user's step.
        """
        if max(parts.sizes) >= FEWEST:
            return
        here = batch.in_parts
        if here is None:
            few = next(slices(self.module, moved, None, FEWEST))
        else:
            few = sent(here.few, self.device, here.whole, moved)
        with RecordedLogs(self.module).recording():
            run_forward(step, few)


def arguments(step: Callable[..., Any], batch: Any, loader: int) -> tuple[Any, ...]:
    """The arguments that Lightning would pass: batch, and batch and loader index if the step takes them.

    Args:
        step: of the user.
        batch: or a part of one.
        loader: index of its loader.
    """
    parameters = inspect.signature(step).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return batch, 0
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (batch, 0, loader)[: len(positional)]
