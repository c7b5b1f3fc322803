"""The naive schedule: the whole batch goes through the user's own code at once, one stage after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Glue = Callable[[], AbstractContextManager[None]]


class NaiveSchedule:
    """Runs each of the user's steps whole, its operations outside the blocks on the devices of their operands.

    One device works at a time. Loss and gradients are those of the unsplit model: the same operations run in the same
    order.

    Example:
        >>> from contextlib import nullcontext
        >>> NaiveSchedule(nullcontext).run(lambda batch: 2 * batch, 3)
        6

    Args:
        glue: the context in which operations between blocks find their operands in one place.
    """

    name = "naive"
    micro_batches = 1

    def __init__(self, glue: Glue) -> None:
        self._glue = glue

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, or a backward, in which activation checkpointing may run the user's code again.

        Args:
            step: the user's training, validation, test or prediction step, or a backward.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            What it returns.
        """
        with self._glue():
            return step(*args, **kwargs)
