"""Gradients of the last step are dropped before the next forward, where Lightning keeps them until after it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch.optim import Optimizer

from autobalance.compat import skips_backward
from autobalance.strategy.registration import imported_roots, overrides


def drop_stale_gradients(trainer: Any, optimizers: Sequence[Optimizer]) -> None:
    """Free the gradients that Lightning would zero between `training_step` and `backward` anyway.

    They would be at the peak of memory, beside all that the forward saves. They stay while gradients are accumulated,
    in manual optimization, and where the user's own hooks look at them when Lightning zeroes them.

    Args:
        trainer: a Trainer about to run a training step.
        optimizers: its optimizers.
    """
    first_to_accumulate = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
    if first_to_accumulate and frees_gradients_early(trainer) and not skips_backward(trainer):
        for optimizer in optimizers:
            optimizer.zero_grad()


def frees_gradients_early(trainer: Any) -> bool:
    """Whether the last step's gradients may go early: optimization is automatic, and no hook looks at them.

    Args:
        trainer: a Trainer in `fit`.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return False
    return not (overrides(module, "optimizer_zero_grad") or _is_used(trainer, "on_before_zero_grad"))


def sees_gradients_before_backward(trainer: Any) -> bool:
    """Whether a hook may look at gradients after a training step and before its backward.

    Args:
        trainer: a Trainer.
    """
    return _is_used(trainer, "on_before_backward")


def _is_used(trainer: Any, hook: str) -> bool:
    # A callback may be one to both packages.
    plain = {getattr(import_module(f"{package}.callbacks").Callback, hook) for package in imported_roots()}
    return overrides(trainer.lightning_module, hook) or any(
        getattr(type(own), hook) not in plain for own in trainer.callbacks
    )
