"""Run a step again that ran out of memory: everything as before it, under a plan for the memory that there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from autobalance.compat import forget_unscaling, skips_backward
from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.plan import Plan
from autobalance.placement.contents import tensors_in
from autobalance.strategy.planning.plan_changes import changes
from autobalance.strategy.planning.replan import Learned, held_by_others, room
from autobalance.strategy.recovery.reserve import reserve_update
from autobalance.strategy.recovery.shortage import Shortage, free_memory, is_out_of_memory, let_go
from autobalance.strategy.recovery.step_state import ADDED, BY_HAND, DROPPED, Parts, StepState
from autobalance.strategy.recovery.stories import Story, half_updated
from autobalance.strategy.recovery.update_state import UpdateState
from autobalance.strategy.watching.drift import Drift

ATTEMPTS = 3
"""Failures in a row of one batch after which the error is the user's."""
# What a device that ran out of memory twice, though it said that there was enough, is planned to hold less.
_MARGIN = 0.1
# Of a batch, by the Trainer's stage.
_KINDS = {
    "train": "train",
    "sanity_check": "validate",
    "validate": "validate",
    "test": "test",
    "predict": "predict",
}


class Recovery:
    """Catches out-of-memory errors around the steps of a strategy.

    Args:
        strategy: whose steps they are; it moves its model to another plan with `rebalance`.
        drift: knows the batch that is run.
    """

    def __init__(self, strategy: Any, drift: Drift) -> None:
        self._strategy = strategy
        self._drift = drift
        self._parts: Parts | None = None
        self._latest: tuple[StepState, Any, UpdateState] | None = None
        self._given_up: BaseException | None = None
        self._updating: Optimizer | None = None

    @property
    def learned(self) -> Learned:
        """What the run has shown of its needs."""
        return self._drift.learned

    def forget(self) -> None:
        """The model changes, or the run has ended."""
        self._parts = self._latest = self._given_up = None

    def run(self, call: Callable[[], Any], batch: Any = None) -> Any:
        """Run one step, or the forward and backward of a training step, and again where memory runs out.

        Args:
            call: the step.
            batch: what it is for; moved along if the root device changes.

        Raises:
            torch.OutOfMemoryError: nothing helps; the error is the first one, with what was tried.
        """
        if not self._strategy.options.retry_on_oom:
            return call()
        story = Story(self._strategy)
        try:
            while True:
                state = StepState(self._trainer, self._known_parts(), self._gradients)
                try:
                    result = call()
                except RuntimeError as error:
                    if not is_out_of_memory(error) or error is self._given_up:
                        raise
                    story.add(error, Shortage.of(error, self._devices))
                    let_go(error)
                else:
                    state.settle()
                    break
                self._recover(state, story, batch)
            if self._updating is not None:
                self._reserve(story, batch)
                self._latest = state, batch, UpdateState(self._updating)
            return result
        finally:
            story.close()

    def update(self, step: Callable[[], Any], optimizer: Optimizer) -> Any:
        """Run an optimizer step, whose closure runs through `run`.

        Args:
            step: calls the optimizer with its closure.
            optimizer: the optimizer.

        Raises:
            torch.OutOfMemoryError: memory ran out, and weights are half updated, or nothing helps.
        """
        if not self._strategy.options.retry_on_oom:
            return step()
        story = Story(self._strategy)
        self._updating = optimizer
        try:
            while True:
                self._latest = None
                try:
                    return step()
                except RuntimeError as error:
                    if not is_out_of_memory(error) or error is self._given_up:
                        raise
                    story.add(error, Shortage.of(error, self._devices))
                    let_go(error)
                self._recover_update(story)
        finally:
            self._updating = self._latest = None
            story.close()

    def _recover_update(self, story: Story) -> None:
        """Go back to before the batch whose optimizer step failed, if that has changed nothing yet."""
        if self._latest is None:
            self._give_up(story, "It happened outside of forward and backward, before the optimizer step.")
        state, batch, before = self._latest
        self._latest = None
        if before.has_updated:
            self._give_up(story, half_updated(self._trainer))
        if self._gradients == ADDED:
            self._give_up(story, "No weight has changed, but the gradients of the whole window would be lost.")
        before.put_back()
        del before  # holds optimizer state, which may have to move
        forget_unscaling(self._strategy.precision_plugin, self._updating)
        self._recover(state, story, batch)

    def _recover(self, state: StepState, story: Story, batch: Any) -> None:
        """Put everything back, and find a plan under which the batch can run."""
        if reason := state.refusal():
            self._give_up(story, f"The batch cannot be run again: {reason}.")
        state.put_back()
        free_memory(self._devices)
        if len(story.shortages) >= ATTEMPTS:
            self._give_up(story, f"That were {ATTEMPTS} failures in a row: no plan that was tried is enough.")
        tensors = list(tensors_in(batch, in_objects=True))
        if self._is_passing(story.shortages, tensors):
            story.say("there is enough memory again, so the batch is run again under the same plan")
        else:
            self._change_plan(story, tensors)
        state.put_random_numbers_back()

    def _reserve(self, story: Story, batch: Any) -> None:
        """Have the memory of the optimizer step at hand, if need be by another plan: gradients move with weights."""
        while True:
            try:
                return reserve_update(self._plan, self._devices, self._trainer.optimizers)
            except torch.OutOfMemoryError as error:
                story.add(error, Shortage.of(error, self._devices))
                let_go(error)
            free_memory(self._devices)
            if len(story.shortages) >= ATTEMPTS:
                self._give_up(story, "The optimizer step has not begun: all weights are as before it.")
            tensors = list(tensors_in(batch, in_objects=True))
            if self._is_passing(story.shortages, tensors):
                story.say("there is enough memory for the optimizer step again")
            else:
                self._change_plan(story, tensors, "the optimizer step goes on from there")

    def _is_passing(self, shortages: list[Shortage], batch: list[Tensor]) -> bool:
        """Whether the device has what the plan takes; if that is not to be believed, count on less there."""
        if len(shortages) == 1 and self._drift.is_batch_larger:
            return False  # a plan for this batch may be all that is needed
        latest, peaks, unforeseen = shortages[-1], self._plan.peaks, self.learned.unforeseen
        others = held_by_others(self._trainer, self._devices, batch)
        targets = room(self._trainer, self._devices, self.learned, batch)
        for index in range(len(peaks)) if latest.device is None else [latest.device]:
            beyond = latest.need - others[index] - peaks[index] if latest.device is not None else 0
            if beyond <= 0 and targets[index].capacity < peaks[index]:
                continue  # another plan for what is there is enough
            if beyond <= 0 and len(shortages) == 1:
                return True
            at_least = beyond if beyond > 0 else int(_MARGIN * peaks[index])
            unforeseen[index] = max(2 * unforeseen.get(index, 0), at_least)
        return False

    def _change_plan(self, story: Story, batch: list[Tensor], then: str = "the batch is run again") -> None:
        before = self._plan
        self._drift.meet(_KINDS[self._trainer.state.stage.value])
        try:
            self._strategy.rebalance(self.learned, batch)
        except InfeasiblePlanError as error:
            self._give_up(story, f"No other plan fits either: {error}")
        except torch.OutOfMemoryError as error:
            self._give_up(story, f"Memory ran out again while blocks moved to another plan: {error}")
        story.say(f"the plan was made again ({changes(before, self._plan)}) and {then}")

    def _give_up(self, story: Story, why: str) -> NoReturn:
        self._given_up = story.error(why)
        raise self._given_up

    @property
    def _gradients(self) -> str:
        """What a step does with the gradients that are there when it begins."""
        trainer = self._trainer
        if not trainer.training:
            return ADDED
        if not trainer.lightning_module.automatic_optimization:
            return BY_HAND
        is_first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        return DROPPED if is_first and not skips_backward(trainer) else ADDED

    def _known_parts(self) -> Parts:
        if self._parts is None:
            self._parts = Parts(self._trainer.lightning_module)
        return self._parts

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    @property
    def _plan(self) -> Plan:
        plan: Plan = self._strategy.plan
        return plan

    @property
    def _devices(self) -> list[torch.device]:
        return list(self._strategy.parallel_devices)
