"""Training steps of a trial: as Lightning runs them around the user's, whole or in micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from autobalance import compat
from autobalance.compat import gradient_hooks
from autobalance.execution.batch_norm import deferring
from autobalance.execution.batches.splitting import Parts
from autobalance.profiling.trial import Batch, Glue, Mark
from autobalance.strategy.gradients import frees_gradients_early, sees_gradients_before_backward
from autobalance.strategy.parts.early_gradients import EarlyGradients
from autobalance.strategy.parts.pipelined import PipelinedSteps, backward_of_part
from autobalance.strategy.parts.recorded_logs import RecordedLogs
from autobalance.strategy.registration import overrides
from autobalance.strategy.trials.metrics import end_step_of_metrics
from autobalance.strategy.trials.twin import Twin, arguments

MICRO_STEPS = 2  # of accumulation: gradients exist only from the second on


class TrialTraining:
    """Optimizer steps of a copy, one after the other.

    Args:
        twin: the copy.
        package: its Lightning package.
        accumulate: batches whose gradients one optimizer step adds up.
        glue: the context for the user's code.
        mark: told where each phase begins.
    """

    def __init__(self, twin: Twin, package: str, accumulate: int, glue: Glue, mark: Mark) -> None:
        self._twin = twin
        self._package = package
        self._accumulate = accumulate
        self._glue = glue
        self._mark = mark

    def run(self, batch: Batch, number: int) -> None:
        """One optimizer step.

        Args:
            batch: all of its batches are like this one.
            number: of the step, from 1.
        """
        twin = self._twin
        if twin.module.automatic_optimization:
            self._run_automatically(batch, number)
        else:
            twin.trainer.strategy.begin_manual_step(number)
            self._step(twin.moved(batch))
            twin.logged.end_batch()

    def _run_automatically(self, batch: Batch, number: int) -> None:
        twin = self._twin
        strategy = twin.trainer.strategy
        if not strategy.optimizers:
            return
        micro_steps = 1 if twin.takes_windows else min(self._accumulate, MICRO_STEPS)
        drops_early = frees_gradients_early(twin.real)
        for micro_step in range(micro_steps):
            moved = self._moved(batch)
            if drops_early and micro_step == 0:
                strategy.optimizers[0].zero_grad()
            self._mark(f"step {number} forward")
            closure = self._closure(batch, moved, number, micro_step)
            if micro_step == micro_steps - 1:
                with self._glue() if self._steps_by_hand else nullcontext():
                    twin.module.optimizer_step(0, 0, strategy._lightning_optimizers[0], closure)
            else:
                closure()
            result = closure.consume_result()
            twin.logged.end_batch()
            del moved, closure, result

    @property
    def _steps_by_hand(self) -> bool:
        """Whether the user's own code takes optimizer steps; Lightning's touches nothing on several devices."""
        return overrides(self._twin.module, "optimizer_step")

    def _moved(self, batch: Batch) -> Any:
        """The batch on the root device; of a window all batches, as a list."""
        twin = self._twin
        if twin.pipeline is None or not twin.takes_windows:
            return twin.moved(batch)
        return [twin.moved(batch) for _ in range(twin.micro_batches)]

    def _closure(self, batch: Batch, moved: Any, number: int, micro_step: int) -> Any:
        closure_class, result_class = compat.closure_classes(self._package)
        module, strategy = self._twin.module, self._twin.trainer.strategy
        optimizer = strategy.optimizers[0]

        def step() -> Any:
            if self._twin.pipeline is None:
                output = self._step(moved)
            else:
                # The first step is there for the optimizer's state, on top of which the second holds all the rest.
                most = 1 if number == 1 else None
                output = self._step_in_parts(batch, moved, micro_step == 0, most)
            return result_class.from_training_step_output(output, self._accumulate)

        def zero_grad() -> None:
            with self._glue():
                module.on_before_zero_grad(optimizer)
                module.optimizer_zero_grad(0, 0, optimizer)

        def backward(loss: torch.Tensor) -> None:
            self._mark(f"step {number} backward")
            strategy.backward(loss, optimizer)
            self._mark(f"step {number} optimizer")

        return closure_class(step_fn=step, backward_fn=backward, zero_grad_fn=None if micro_step else zero_grad)

    def _step(self, moved: Any) -> Any:
        self._twin.logged.begin("training_step", 0)
        return self._step_on(moved)

    def _step_on(self, part: Any) -> Any:
        step = self._twin.module.training_step
        with self._twin.precision_plugin.train_step_context(), self._glue():
            return step(*arguments(step, part, 0))

    def _step_in_parts(self, batch: Batch, moved: Any, is_first: bool, most: int | None) -> Any:
        """A training step with its backwards, as `MicroBatchedSteps` runs it, or `AccumulatedSteps` a window."""
        twin = self._twin
        assert twin.pipeline is not None
        parts = twin.parts(batch, moved, trains=True)
        if parts is None and not twin.takes_windows:
            return self._step(moved)
        module, strategy = twin.module, twin.trainer.strategy
        optimizer = strategy.optimizers[0]

        def backward(loss: torch.Tensor) -> None:
            with self._glue():
                backward_of_part(twin.precision_plugin, loss / self._accumulate, module, optimizer)

        twin.logged.begin("training_step", 0)
        hooks = [[_leave_gradient for _ in gradient_hooks(own)] for own in twin.real.lightning_module.parameters()]
        early = EarlyGradients(module.parameters(), is_first, sees_gradients_before_backward(twin.real), hooks)
        logs = RecordedLogs(module)
        steps, step = PipelinedSteps(twin.pipeline, logs), self._step_on
        if parts is not None:
            if most is not None:
                twin.test(batch, moved, parts, step)
            parts = Parts(parts.batches[:most], parts.sizes[:most], parts.weights[:most])
            with deferring(twin.norms):
                output = steps.train(parts, step, backward)
        else:
            *_, output = steps.train_each(moved[:most], step, backward)
            for number in range(len(moved[:most])):
                logs.replay_one(number)
        end_step_of_metrics(module)
        early.set_aside()
        strategy.early = early
        return output


def _leave_gradient(gradient: torch.Tensor) -> None:
    """Stands for the user's hooks on parameters."""
