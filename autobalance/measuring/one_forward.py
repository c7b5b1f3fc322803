"""The forward of one step, and nothing after it: no backward, no step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from autobalance.profiling.trial import Batch, Trial


def run_one_forward(
    trial: Trial, twin: nn.Module, batch: Batch, device: torch.device, within: AbstractContextManager[Any] | None = None
) -> None:
    """Run a step of a trial until its forward has ended.

    A step that does all by itself, as with manual optimization, runs to its end, but its optimizers change nothing.

    Example:
        >>> run_one_forward(PlainTrial(), twin, Batch("train batch", "train", data), torch.device("cpu"))

    Args:
        trial: runs the step.
        twin: a copy of the model.
        batch: on the host.
        device: where the glue runs.
        within: around every stretch of the user's code.
    """
    for optimizer in trial.prepare(twin, device):
        optimizer.step = _take_no_step  # type: ignore[method-assign]  # parameters may be the user's own
    with suppress(_Done):
        trial.run(twin, batch, _Forward(within or nullcontext()).glue, _ignore)


class _Done(Exception):
    """The forward has ended."""


class _Forward:
    """Ends the trial when the user's code is entered again after a whole stretch of it: for backward or a next step."""

    def __init__(self, within: AbstractContextManager[Any]) -> None:
        self._within = within
        self._depth = 0
        self._ended = False

    @contextmanager
    def glue(self) -> Iterator[None]:
        if self._ended and self._depth == 0:
            raise _Done
        self._depth += 1
        try:
            with self._within if self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1
            self._ended = True


def _take_no_step(closure: Callable[[], Any] | None = None) -> Any:
    """Stands for an optimizer's step."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _ignore(name: str) -> None:
    """Nobody asks when phases begin."""
