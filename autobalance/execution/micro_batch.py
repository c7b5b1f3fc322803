"""Which micro-batch of a step the code of this thread works on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatch:
    """One of the parts into which the batch of a step is split.

    Attributes:
        index: its number, from 0.
        count: how many there are.
        seed: of the step's random numbers; None: they come as in the unsplit step.
    """

    index: int
    count: int
    seed: int | None = None


class _Current(threading.local):
    micro_batch: MicroBatch | None = None


_current = _Current()


def current_micro_batch() -> MicroBatch | None:
    """The micro-batch that this thread works on; None outside of steps that are split.

    Example:
        >>> with working_on(MicroBatch(1, 4)):
        ...     current_micro_batch().index
        1
    """
    return _current.micro_batch


@contextmanager
def working_on(micro_batch: MicroBatch) -> Iterator[None]:
    """Say that what runs inside, in this thread, belongs to a micro-batch.

    Args:
        micro_batch: which.
    """
    before, _current.micro_batch = _current.micro_batch, micro_batch
    try:
        yield
    finally:
        _current.micro_batch = before
