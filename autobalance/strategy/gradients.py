"""Gradients of the last step are dropped before the next forward, where Lightning keeps them until after it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch.optim import Optimizer

from autobalance.compat import skips_backward
from autobalance.strategy.registration import lightning_root


def drop_stale_gradients(trainer: Any, optimizers: Sequence[Optimizer]) -> None:
    """Free the gradients that Lightning would zero between `training_step` and `backward` anyway.

    They would be at the peak of memory, beside all that the forward saves. They stay while gradients are accumulated, in
    manual optimization, and where the user's own hooks look at them when Lightning zeroes them.

    Args:
        trainer: a Trainer about to run a training step.
        optimizers: its optimizers.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization or skips_backward(trainer) or trainer.strategy.handles_gradient_accumulation:
        return
    batch_index = trainer.fit_loop.epoch_loop.batch_idx
    if batch_index % trainer.accumulate_grad_batches or _gradients_are_looked_at(trainer):
        return
    for optimizer in optimizers:
        optimizer.zero_grad()


def _gradients_are_looked_at(trainer: Any) -> bool:
    package = lightning_root(trainer)
    is_overridden = import_module(f"{package}.utilities.model_helpers").is_overridden
    module = trainer.lightning_module
    if is_overridden("optimizer_zero_grad", module) or is_overridden("on_before_zero_grad", module):
        return True
    callback = import_module(f"{package}.callbacks").Callback
    return any(type(own).on_before_zero_grad is not callback.on_before_zero_grad for own in trainer.callbacks)
