"""The steps of the Trainer's run in micro-batches, between Lightning's own calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from autobalance.execution.pipeline import Pipeline
from autobalance.strategy.parts.accumulated import AccumulatedSteps
from autobalance.strategy.parts.micro_batched import MicroBatchedSteps
from autobalance.strategy.parts.splittable import on_deferred
from autobalance.strategy.placed import Placed
from autobalance.strategy.summary import tell

Glue = Callable[[], AbstractContextManager[None]]


class StepsInParts(Protocol):
    """Runs steps in micro-batches, the backwards of training steps too, which Lightning asks for only later."""

    @property
    def have_run_backward(self) -> bool:
        """Whether the training step before has made its gradients, which `backward` then only gives back."""

    @property
    def is_in_window(self) -> bool:
        """Whether batches that are still to come have been run already."""

    def refusal(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
        """Why batches of this step must not be split; None: they may.

        Args:
            step: Lightning's step of the strategy.
            args, kwargs: of the step, the batch first.
        """

    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step with its backwards.

        Args:
            step: Lightning's step of the strategy.
            args, kwargs: of the step, the batch first.
        """

    def give_back_gradients(self) -> None:
        """Show the gradients that the last training step has made."""

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a validation, test or prediction step.

        Args:
            step: Lightning's step of the strategy.
            args, kwargs: of the step, the batch first.
        """

    def is_prepared(self, batch: Any) -> bool:
        """Whether a batch has been through the hooks around its transfer ahead of its turn.

        Args:
            batch: any.
        """

    def remove(self) -> None:
        """Let Lightning see to its batches by itself again."""


def steps_in_parts(trainer: Any, placed: Placed, glue: Glue, batch_norm: str) -> StepsInParts | None:
    """What runs the steps of a placed model in micro-batches; None where batches stay whole.

    Args:
        trainer: in a run.
        placed: its model.
        glue: the context for the user's code.
        batch_norm: "deferred" for running statistics as of the full batch.
    """
    pipeline: Pipeline | None = placed.pipeline
    if pipeline is None:
        return None
    if placed.plan.accumulated:
        return AccumulatedSteps(trainer, pipeline, glue)
    defers = batch_norm == "deferred" and trainer.state.fn == "fit"
    if defers and (said := on_deferred(trainer.lightning_module)):
        tell(trainer, said)
    return MicroBatchedSteps(trainer, pipeline, glue, placed.plan.micro_batches, defers, placed.check_parts)
