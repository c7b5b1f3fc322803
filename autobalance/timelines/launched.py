"""Launches of one step as columns, checked against the stages that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.timeline import Whole
from autobalance.schedules.launches import Launch


class Manner(Enum):
    """How micro-batches share a step."""

    IN_TURN = 0
    """Every one is back before the next one begins."""
    ONE_GRAPH = 1
    """All go forward, and one backward of all their losses follows, or none."""
    OVERLAPPING = 2
    """Each has a backward of its own, which begins while others are under way."""


@dataclass(frozen=True)
class Launched:
    """The launches of one step, in order.

    Attributes:
        stages: how many stages there are.
        parts: for each launch which part of a pass it is: forwards in the order of stages, then backwards from the last
            stage to the first.
        copies: number of its micro-batch, in the order in which they begin.
    """

    stages: int
    parts: Whole
    copies: Whole

    @property
    def count(self) -> int:
        """Micro-batches."""
        return int(self.copies.max()) + 1

    @property
    def training(self) -> bool:
        """Whether there are backwards."""
        return len(self.parts) > self.stages * self.count

    @property
    def manner(self) -> Manner:
        """How micro-batches share the step."""
        if self.training and (np.diff(self.copies) >= 0).all():
            return Manner.IN_TURN
        is_back = self.parts >= self.stages
        return Manner.ONE_GRAPH if (np.diff(is_back.astype(int)) >= 0).all() else Manner.OVERLAPPING

    @cached_property
    def is_first(self) -> NDArray[np.bool_]:
        """Whether a launch is the first of its part."""
        first = np.zeros(len(self.parts), dtype=np.bool_)
        first[np.unique(self.parts, return_index=True)[1]] = True
        return first

    @cached_property
    def is_last(self) -> NDArray[np.bool_]:
        """Whether a launch is the last of its part."""
        last = np.zeros(len(self.parts), dtype=np.bool_)
        last[len(self.parts) - 1 - np.unique(self.parts[::-1], return_index=True)[1]] = True
        return last

    @cached_property
    def leaders(self) -> Whole:
        """By part, the micro-batch that is the first there."""
        leaders: Whole = np.zeros(2 * self.stages, dtype=np.int64)
        leaders[self.parts[self.is_first]] = self.copies[self.is_first]
        return leaders


def launched_of(order: Sequence[Launch], stages: Sequence[tuple[int, int]], blocks: int) -> Launched:
    """Columns of launches.

    Example:
        >>> launched_of(launch_order("1f1b", 2, 4), [(0, 1), (1, 2)], blocks=2).manner
        <Manner.OVERLAPPING: 2>

    Args:
        order: launches of one step.
        stages: first block, and one past the last, of every stage.
        blocks: how many there are.

    Raises:
        ValueError: stages that are not all blocks in order, or launches that do not fit them.
    """
    bounds = [0, *(stop for _, stop in stages)]
    if (
        not stages
        or bounds[-1] != blocks
        or any(start != bound or stop <= start for (start, stop), bound in zip(stages, bounds, strict=False))
    ):
        raise ValueError(f"stages={list(stages)} are not the {blocks} blocks in call order, one stage after the other")
    if any(launch.stage >= len(stages) for launch in order):
        raise ValueError(f"the order launches stage {max(launch.stage for launch in order)} of {len(stages)} stages")
    numbers = {number: copy for copy, number in enumerate(dict.fromkeys(launch.micro_batch for launch in order))}
    last = 2 * len(stages) - 1
    found = [
        (last - launch.stage if launch.backward else launch.stage, numbers[launch.micro_batch]) for launch in order
    ]
    passes = 2 if any(launch.backward for launch in order) else 1
    if not order or len(set(found)) != len(found) or len(found) != passes * len(stages) * len(numbers):
        raise ValueError(
            f"{len(order)} launches of {len(numbers)} micro-batches in {len(stages)} stages: each micro-batch is to be "
            f"launched once forward in every stage, and once backward in every stage or in none"
        )
    parts, copies = np.array(found, dtype=np.int64).T
    return Launched(len(stages), parts, copies)
