"""The backwards of micro-batches inside `training_step`, where Lightning runs that of the batch only later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from autobalance.compat import gradient_hooks, gradient_hooks_off
from autobalance.strategy.gradients import sees_gradients_before_backward
from autobalance.strategy.parts.early_gradients import EarlyGradients
from autobalance.strategy.parts.pipelined import backward_of_part


class InnerBackwards:
    """Runs those of one training step, and keeps their gradients until Lightning asks for a backward.

    Example:
        >>> backwards = InnerBackwards(trainer, glue)                             # doctest: +SKIP
        >>> with backwards.made():                                                # doctest: +SKIP
        ...     output = steps.train(parts, step, backwards.run)
        >>> backwards.give_back()                                                 # doctest: +SKIP

    Args:
        trainer: in `fit`, about to run the step; its model has the gradients of the batches before.
        glue: the context for the user's code.
    """

    def __init__(self, trainer: Any, glue: Callable[[], AbstractContextManager[None]]) -> None:
        self._trainer = trainer
        self._glue = glue
        self._parameters = list(trainer.lightning_module.parameters())
        are_zeroed = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        hooks = [gradient_hooks(parameter) for parameter in self._parameters]
        self._early = EarlyGradients(self._parameters, are_zeroed, sees_gradients_before_backward(trainer), hooks)

    @property
    def can_be_dropped(self) -> bool:
        """Whether gradients of batches before this one come out whole where micro-batches fail."""
        return self._early.can_be_dropped

    @contextmanager
    def made(self) -> Iterator[None]:
        """The micro-batches run inside; hooks on parameters wait for the gradient of all of them."""
        with self._early.made(), gradient_hooks_off(self._parameters):
            yield

    def run(self, loss: Tensor) -> None:
        """Run the backward of one or more parts as Lightning would, without the hooks around it.

        Args:
            loss: weighted, but not yet divided by the batches whose gradients are added up.
        """
        trainer = self._trainer
        divided = loss / trainer.accumulate_grad_batches
        with self._glue():
            backward_of_part(trainer.precision_plugin, divided, trainer.lightning_module, trainer.optimizers[0])

    def give_back(self) -> None:
        """Show the gradients, and have hooks on parameters see them."""
        with self._glue():
            self._early.give_back()
