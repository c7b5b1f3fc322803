"""Gradients that micro-batches make inside `training_step`, where Lightning zeroes gradients after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Hook = Callable[[Tensor], Tensor | None]


class EarlyGradients:
    """Sets gradients aside while Lightning zeroes, and gives them back where its backward would have made them.

    Lightning runs `training_step`, then `zero_grad`, then `backward`.

    Example:
        >>> early = EarlyGradients(module.parameters(), are_zeroed=True)
        >>> with early.made(), gradient_hooks_off(module.parameters()):
        ...     ...                       # backwards of micro-batches
        >>> optimizer.zero_grad()
        >>> early.give_back()

    Args:
        parameters: whose gradients.
        are_zeroed: whether Lightning zeroes after the step. Gradients of the last step then wait until `set_aside`, for
            hooks that look at them; else what earlier batches have accumulated stays, and is added to.
        are_seen: whether anything looks at gradients between the step and its backward.
        hooks: for each parameter those on its gradient, which `give_back` calls since no backward has; None: it calls
            none.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        are_zeroed: bool,
        are_seen: bool = False,
        hooks: Sequence[Sequence[Hook]] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._hooks = [()] * len(self._parameters) if hooks is None else hooks
        self._are_apart = [are_zeroed or are_seen or bool(hooks) for hooks in self._hooks]
        self._waiting = self._taken()

    @property
    def can_be_dropped(self) -> bool:
        """Whether none of them is added to a gradient that was there before, to spare a copy."""
        return all(self._are_apart)

    def set_aside(self) -> None:
        """The micro-batches are done: show the gradients that were there before."""
        early = self._taken()
        for parameter, gradient, is_apart in zip(self._parameters, self._waiting, self._are_apart, strict=True):
            if is_apart:
                parameter.grad = gradient
        self._waiting = early

    @contextmanager
    def made(self) -> Iterator[None]:
        """The micro-batches run inside; where they fail, the gradients that were there before are shown again."""
        try:
            yield
        except BaseException:
            self._give_up()
            raise
        self.set_aside()

    def _give_up(self) -> None:
        for parameter, gradient, is_apart in zip(self._parameters, self._waiting, self._are_apart, strict=True):
            if is_apart:
                parameter.grad = gradient
        self._waiting = []

    def give_back(self) -> None:
        """Show the gradients of the micro-batches, on top of those that were not zeroed."""
        waiting, self._waiting = self._waiting[::-1], []
        for parameter, hooks in zip(self._parameters, self._hooks, strict=True):
            early = waiting.pop()
            if early is None:
                continue
            with torch.no_grad():
                for hook in hooks:
                    changed = hook(early)
                    early = early if changed is None else changed
            if parameter.grad is None:
                parameter.grad = early.clone() if hooks else early  # a hook may have kept it
            else:
                parameter.grad += early

    def _taken(self) -> list[Tensor | None]:
        taken: list[Tensor | None] = []
        for parameter, is_apart in zip(self._parameters, self._are_apart, strict=True):
            taken.append(parameter.grad if is_apart else None)
            if is_apart:
                parameter.grad = None
        return taken
