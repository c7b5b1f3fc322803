"""Gradients that micro-batches make inside `training_step`, where Lightning zeroes gradients after it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class EarlyGradients:
    """Sets gradients aside while Lightning zeroes, and gives them back where its backward would have made them.

    Lightning runs `training_step`, then `zero_grad`, then `backward`.

    Example:
        >>> early = EarlyGradients(module.parameters(), are_zeroed=True)
        >>> ...                           # backwards of micro-batches
        >>> early.set_aside()
        >>> optimizer.zero_grad()
        >>> early.give_back()

    Args:
        parameters: whose gradients.
        are_zeroed: whether Lightning zeroes after the step. Gradients of the last step then wait until `set_aside`, for
            hooks that look at them; else what earlier batches have accumulated stays, and is added to.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], are_zeroed: bool) -> None:
        self._parameters = list(parameters)
        self._are_zeroed = are_zeroed
        self._waiting: list[Tensor | None] = self._taken() if are_zeroed else []

    def set_aside(self) -> None:
        """The micro-batches are done: show the gradients that were there before, if they are to be zeroed."""
        if self._are_zeroed:
            early = self._taken()
            self._put(self._waiting)
            self._waiting = early

    def give_back(self) -> None:
        """Show the gradients of the micro-batches, on top of those that were not zeroed: of what no optimizer has."""
        if self._are_zeroed:
            for parameter, early in zip(self._parameters, self._waiting, strict=True):
                if early is not None and parameter.grad is not None:
                    early += parameter.grad
                parameter.grad = parameter.grad if early is None else early
            self._waiting = []

    def _taken(self) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return taken

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
