"""The batches of one `accumulate_grad_batches` window as the micro-batches of one step.

At the first batch of a window the following ones are taken from the loader ahead of time, and all go through the
pipeline together. At its own turn each batch then shows what it has given: loss, logs, outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from autobalance.compat import leave_prepared_alone, put_back, skips_backward, take_ahead, transferred_by_loop
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.seeds import step_seed
from autobalance.placement.contents import tensors_in
from autobalance.strategy.parts.inner_backwards import InnerBackwards
from autobalance.strategy.parts.order_test import reason_for_order
from autobalance.strategy.parts.pipelined import PipelinedSteps
from autobalance.strategy.parts.recorded_logs import RecordedLogs
from autobalance.strategy.parts.splittable import hooks_after_accumulation, hooks_on_gradients
from autobalance.strategy.parts.toggled import Toggled


class AccumulatedSteps:
    """Runs windows of batches, and stands between Lightning's `training_step`, `zero_grad` and `backward`.

    Args:
        trainer: in `fit`, its model placed.
        pipeline: runs micro-batches; the doors of the model's blocks tell it of their calls.
        glue: the context for the user's code.
    """

    def __init__(self, trainer: Any, pipeline: Pipeline, glue: Callable[[], AbstractContextManager[None]]) -> None:
        self._trainer = trainer
        self._glue = glue
        self._logs = RecordedLogs(trainer.lightning_module)
        self._steps = PipelinedSteps(pipeline, self._logs)
        self._prepared: dict[tuple[int, ...], Any] = {}
        self._as_loaded: dict[tuple[int, ...], Any] = {}
        self._results: deque[tuple[int, Any]] = deque()
        self._backwards: InnerBackwards | None = None
        self._has_stepped = False
        self._is_tested = False
        self._undo = leave_prepared_alone(trainer.lightning_module, self.is_prepared)

    def remove(self) -> None:
        """Let the training loop see to its batches by itself again, from what the loader gave."""
        self._undo()
        put_back(self._trainer, lambda batch: self._as_loaded.get(_identity(batch), batch))
        self._as_loaded.clear()

    def is_prepared(self, batch: Any) -> bool:
        """Whether a batch has been through the hooks around its transfer ahead of its turn."""
        return _identity(batch) in self._prepared

    @property
    def is_in_window(self) -> bool:
        """Whether batches that are still to come have been through the pipeline."""
        return bool(self._results)

    @property
    def have_run_backward(self) -> bool:
        """Whether the training step before has made its gradients, which `backward` then only gives back."""
        return self._has_stepped

    def refusal(self, step: Callable[..., Any], batch: Any, *others: Any) -> str | None:
        """Against whole batches are hooks that want one backward after the other, and steps that want their order.

        Args:
            step: Lightning's step of the strategy.
            batch: of this step.
            others: its number in the epoch, if the step takes that.
        """
        if self.is_in_window or skips_backward(self._trainer):
            return None
        module = self._trainer.lightning_module
        return hooks_after_accumulation(module) or hooks_on_gradients(module) or self._tested(step, batch, others)

    def _tested(self, step: Callable[..., Any], batch: Any, others: tuple[Any, ...]) -> str | None:
        """What the test before the first window of two batches or more has found."""
        if self._is_tested or not (following := self._take_ahead(min(1, self._to_come))):
            return None
        self._is_tested = True
        both = [(batch, *others), (following[0], *(number + 1 for number in others))]
        with Toggled(self._trainer.lightning_module) as toggled:
            reason = reason_for_order(self._trainer, step, both, self._glue)
        return reason or toggled.against(self._trainer.strategy.plan.schedule)

    def train(self, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """The training step of one batch: at the first of a window, those of all others too.

        Args:
            step: Lightning's step of the strategy.
            batch: of this step.
            others: its number in the epoch, if the step takes that.

        Returns:
            What the user's step returned for this batch.
        """
        if skips_backward(self._trainer):  # a whole epoch counts as one window then
            return self.evaluate(step, batch, *others)
        if not self._results:
            self._run_window(step, batch, takes_number=bool(others))
        self._prepared.pop(_identity(batch), None)
        self._as_loaded.pop(_identity(batch), None)
        number, output = self._results.popleft()
        self._logs.replay_one(number)
        self._has_stepped = True
        return output

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a validation, test or prediction step: one batch alone."""
        with self._glue():
            return step(*args, **kwargs)

    def give_back_gradients(self) -> None:
        """Show the gradients of the whole window at its first batch; the others have none of their own."""
        self._has_stepped = False
        if self._backwards is not None:
            self._backwards.give_back()
            self._backwards = None

    def _run_window(self, step: Callable[..., Any], batch: Any, takes_number: bool) -> None:
        trainer = self._trainer
        batches = list(enumerate([batch, *self._take_ahead(self._to_come)], trainer.fit_loop.epoch_loop.batch_idx))

        def run(numbered: tuple[int, Any]) -> Any:
            with self._glue():
                return step(numbered[1], numbered[0]) if takes_number else step(numbered[1])

        backwards, seed = InnerBackwards(trainer, self._glue), step_seed(trainer.fit_loop.total_batch_idx)
        with backwards.made():
            outputs = self._steps.train_each(batches, run, backwards.run, seed=seed)
        self._backwards = backwards
        self._results = deque(enumerate(outputs))

    @property
    def _to_come(self) -> int:
        """Batches of this window after the present one."""
        trainer = self._trainer
        batch_idx, accumulated = trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches
        return int(min(accumulated - 1 - batch_idx % accumulated, trainer.num_training_batches - batch_idx - 1))

    def _take_ahead(self, count: int) -> list[Any]:
        ahead = take_ahead(self._trainer, count, self._prepare)
        self._prepared = {_identity(prepared): prepared for prepared in ahead}
        return ahead

    def _prepare(self, batch: Any) -> Any:
        if self.is_prepared(batch):  # by an attempt that ran out of memory
            return batch
        prepared = transferred_by_loop(self._trainer, batch)
        self._as_loaded[_identity(prepared)] = batch
        return prepared


def _identity(batch: Any) -> tuple[int, ...]:
    """Tells batches apart by their tensors: casts make the containers anew."""
    return tuple(id(tensor) for tensor in tensors_in(batch, in_objects=True)) or (id(batch),)
