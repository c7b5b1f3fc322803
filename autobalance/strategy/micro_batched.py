"""Batches in parts: each part is a micro-batch of the step, and what they give is merged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from autobalance.compat import skips_backward
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.seeds import step_seed
from autobalance.execution.splitting import Parts, parts_of
from autobalance.strategy.early_gradients import EarlyGradients
from autobalance.strategy.pipelined import PipelinedSteps, backward_of_part, without_graph
from autobalance.strategy.recorded_logs import RecordedLogs


class MicroBatchedSteps:
    """Splits the batches of one Trainer, and stands between its `training_step`, `zero_grad` and `backward`.

    Args:
        trainer: in a run, its model placed.
        pipeline: runs micro-batches; the doors of the model's blocks tell it of their calls.
        glue: the context for the user's code.
        count: into how many parts a batch is split, as far as it has samples.
    """

    def __init__(
        self, trainer: Any, pipeline: Pipeline, glue: Callable[[], AbstractContextManager[None]], count: int
    ) -> None:
        self._trainer = trainer
        self._count = count
        self._glue = glue
        self._steps = PipelinedSteps(pipeline, RecordedLogs(trainer.lightning_module))
        self._early: EarlyGradients | None = None

    is_in_window = False
    """Whether batches that are still to come have been run: never."""

    @property
    def have_run_backward(self) -> bool:
        """Whether the training step before has made its gradients, which `backward` then only gives back."""
        return self._early is not None

    def train(self, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Run one training step, its backwards too.

        Args:
            step: Lightning's step of the strategy.
            batch: of the step.
            others: what else the step takes.

        Returns:
            What the step would return for the full batch.
        """
        parts = self._parts(batch)

        def run(part: Any) -> Any:
            with self._glue():
                return step(part, *others)

        if len(parts.sizes) < 2:
            return run(batch)
        trainer = self._trainer
        if skips_backward(trainer):
            return self._steps.evaluate(parts, lambda part: without_graph(run(part)))
        accumulated = trainer.accumulate_grad_batches

        def backward(loss: Tensor) -> None:
            with self._glue():
                backward_of_part(
                    trainer.precision_plugin, loss / accumulated, trainer.lightning_module, trainer.optimizers[0]
                )

        is_first = trainer.fit_loop.epoch_loop.batch_idx % accumulated == 0
        early = EarlyGradients(trainer.lightning_module.parameters(), are_zeroed=is_first)
        output = self._steps.train(parts, run, backward, seed=step_seed())
        early.set_aside()
        self._early = early
        return output

    def give_back_gradients(self) -> None:
        """Show the gradients that the last training step has made."""
        assert self._early is not None
        self._early.give_back()
        self._early = None

    def evaluate(self, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Run one validation, test or prediction step.

        Args:
            step: Lightning's step of the strategy.
            batch: of the step.
            others: what else the step takes.

        Returns:
            What the step would return for the full batch, in the order of its samples.
        """
        parts = self._parts(batch)

        def run(part: Any) -> Any:
            with self._glue():
                return step(part, *others)

        return run(batch) if len(parts.sizes) < 2 else self._steps.evaluate(parts, run)

    def is_prepared(self, batch: Any) -> bool:
        """No batch is taken ahead of its turn."""
        return False

    def remove(self) -> None:
        """There is nothing to undo."""

    def _parts(self, batch: Any) -> Parts:
        return parts_of(self._trainer.lightning_module, batch, self._count)
