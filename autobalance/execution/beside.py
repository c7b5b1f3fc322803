"""What is done beside the micro-batches of a pipeline, at each of their visits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from autobalance.execution.micro_batch import MicroBatch


class Beside(Protocol):
    """What else has to be done at each visit of a block, such as seeding random numbers."""

    def begin(self, micro_batch: MicroBatch) -> None:
        """The user's step begins for a micro-batch, in this thread."""

    def end(self, micro_batch: MicroBatch) -> None:
        """It has returned or failed."""

    def suspend(self, micro_batch: MicroBatch) -> None:
        """The thread of a micro-batch is about to hand the baton back."""

    def resume(self, micro_batch: MicroBatch) -> None:
        """The thread of a micro-batch goes on."""

    def enter(self, block: int, micro_batch: MicroBatch) -> None:
        """A block runs next."""

    def leave(self, block: int, micro_batch: MicroBatch) -> None:
        """It has returned or failed."""

    def enter_again(self, block: int) -> None:
        """A block runs next in a backward, where a checkpoint around it runs it again."""

    def leave_again(self, block: int) -> None:
        """It has returned or failed."""


class Again:
    """Tells of the visits of blocks that a checkpoint around them runs again in a backward."""

    def __init__(self, beside: Sequence[Beside]) -> None:
        self._beside = beside

    @property
    def again(self) -> Again:
        return self

    def arrive(self, block: int) -> None:
        """Nothing is suspended in the midst of a backward's node."""

    def enter(self, block: int, args: Any, kwargs: Any) -> None:
        for other in self._beside:
            other.enter_again(block)

    def leave(self, block: int) -> None:
        for other in self._beside:
            other.leave_again(block)
