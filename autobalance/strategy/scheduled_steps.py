"""The user's steps in the order of the plan's schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from autobalance.execution.naive import NaiveSchedule
from autobalance.placement.contents import tensors_in
from autobalance.strategy.gradients import drop_stale_gradients
from autobalance.strategy.options import Options
from autobalance.strategy.parts.splittable import in_words
from autobalance.strategy.parts.steps_in_parts import StepsInParts
from autobalance.strategy.recovery.recovery import Recovery
from autobalance.strategy.summary import tell

if TYPE_CHECKING:
    from pytorch_lightning.strategies import ParallelStrategy as Base

    from autobalance.partitioning.plan import Plan
    from autobalance.strategy.planning.replan import Learned
    from autobalance.strategy.watching.drift import Drift
else:
    Base = object


class ScheduledSteps(Base):
    """The part of a strategy that runs steps: whole, or in micro-batches; again where memory runs out."""

    options: Options
    _trainer: Any
    _given_plan: Plan | None
    _schedule: NaiveSchedule
    _micro_batches: StepsInParts | None
    _recovery: Recovery
    _drift: Drift

    if TYPE_CHECKING:

        def rebalance(self, learned: Learned, batch: Sequence[torch.Tensor] = ()) -> None:
            """Plan again between two steps, and move the model."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step, as the schedule runs it."""
        drop_stale_gradients(self._trainer, self.optimizers)
        if self._micro_batches is not None:
            reason = self._micro_batches.refusal(super().training_step, *args, **kwargs)
            if reason is None:
                return self._micro_batches.train(super().training_step, *args, **kwargs)
            self._stay_whole(reason, list(tensors_in(args, in_objects=True)))
        return self._schedule.run(super().training_step, *args, **kwargs)

    def _stay_whole(self, reason: str, batch: Sequence[torch.Tensor]) -> None:
        """Split no more batches, since that would train something else."""
        tell(self._trainer, in_words([reason]))
        self.options = self.options.whole
        if self._given_plan is None:
            self.rebalance(self._recovery.learned, batch)
        else:
            assert self._micro_batches is not None
            self._micro_batches.remove()
            self._micro_batches = None
            tell(self._trainer, "The given plan counts on split batches: whole ones may need more memory than planned.")

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Backward, as the schedule runs it; where micro-batches have had theirs, the hooks around it."""
        steps, module = self._micro_batches, self.lightning_module
        if steps is None or module is None or not steps.have_run_backward:
            return self._schedule.run(super().backward, closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        steps.give_back_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step, as the schedule runs it."""
        return self._evaluate(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step, as the schedule runs it."""
        return self._evaluate(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step, as the schedule runs it."""
        return self._evaluate(super().predict_step, args, kwargs)

    def _evaluate(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._recovery.run(lambda: self._evaluate_once(step, args, kwargs), args)

    def _evaluate_once(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._micro_batches is not None:  # asked each time: recovery may have changed the plan
            return self._micro_batches.evaluate(step, *args, **kwargs)
        return self._schedule.run(step, *args, **kwargs)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the root device, with the user's hooks, unless that has been done ahead of its turn."""
        if self._micro_batches is not None and self._micro_batches.is_prepared(batch):
            return batch
        self._drift.loads(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The optimizer's step, after the forward and backward in `closure`."""
        step = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        return self._recovery.update(step, optimizer)
