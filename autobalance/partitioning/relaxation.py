"""Lower bounds of what the undecided blocks of a stage still cost: their fractional knapsacks.

Time is the longer of computing and copying, hence at least any weighted mean of the two. Under one weight every option
has one price; the cheapest way to save bytes takes options in the order of price per byte, the last of them in part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.saving_options import Option

Numbers = NDArray[np.float64]

_GOLDEN = (5**0.5 - 1) / 2
_STEPS = 24


class _Knapsack:
    """Steps from one option of a block to the next, in the order of price per byte saved.

    Args:
        options: of every block.
        factors: by which what rests of each block counts.
        weight: of computing; copying has the rest.
    """

    def __init__(self, options: Sequence[Sequence[Option]], factors: Sequence[float], weight: float) -> None:
        steps: list[tuple[float, int, float, float, Option]] = []
        self.bases = np.array([factor * each[0].rests for factor, each in zip(factors, options, strict=True)])
        for block, (factor, each) in enumerate(zip(factors, options, strict=True)):
            steps += _hull(block, each, factor, weight)
        steps.sort(key=lambda step: step[0])
        self.steps = steps
        self._owners = np.array([step[1] for step in steps], dtype=np.int64)
        self._gains = np.array([step[2] for step in steps])
        self._prices = np.array([step[3] for step in steps])
        self._before = np.concatenate([[0.0], np.cumsum(self.bases)])

    def least(self, block: int, needs: Numbers) -> Numbers:
        """Least price at which the blocks before `block` save their share; infinite where they cannot."""
        mine = self._owners < block
        gains = np.concatenate([[0.0], np.cumsum(self._gains[mine])])
        prices = np.concatenate([[0.0], np.cumsum(self._prices[mine])])
        needs = needs + self._before[block]
        # Bytes are whole numbers below 2**53: their sums are exact.
        found: Numbers = np.where(needs > gains[-1], np.inf, np.interp(needs, gains, prices))
        return found


def _hull(
    block: int, options: Sequence[Option], factor: float, weight: float
) -> list[tuple[float, int, float, float, Option]]:
    """Steps of a block along the lower convex hull of its options: (price per byte, block, bytes, price, option)."""
    keep = options[0]
    points = []
    for option in options:
        saved = factor * (keep.rests - option.rests) + option.leaves
        points.append((saved, weight * option.seconds + (1 - weight) * option.copying, option))
    points.sort(key=lambda point: (point[0], point[1]))
    hull = [(0.0, 0.0, keep)]
    for point in points:
        if point[0] <= hull[-1][0]:
            continue
        while len(hull) > 1 and _ratio(hull[-2], point) <= _ratio(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    steps = []
    for before, after in zip(hull, hull[1:], strict=False):
        steps.append((_ratio(before, after), block, after[0] - before[0], after[1] - before[1], after[2]))
    return steps


def _ratio(one: tuple[float, float, Option], other: tuple[float, float, Option]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


class Relaxation:
    """Bounds for all ways of a stage, under the weight that bounds the whole stage best.

    Args:
        options: of every block.
        in_flight: micro-batches.
        seconds: of the stage where all blocks keep what they save.
        inner: the block at which the stage peaks where all keep what they save.
        weight: of computing.
    """

    def __init__(
        self, options: Sequence[Sequence[Option]], in_flight: int, seconds: float, inner: int, weight: float
    ) -> None:
        self._seconds, self._weight, self._inner = seconds, weight, inner
        # What rests of an undecided block counts for each micro-batch, since it comes before all decided ones ...
        self._outer = _Knapsack(options, [in_flight] * len(options), weight)
        # ... but while an undecided block runs, nothing of the current micro-batch rests of those after it.
        factors = [in_flight if block < inner else in_flight - 1 for block in range(len(options))]
        self._within = _Knapsack(options, factors, weight)
        self._runs = min(option.runs for option in options[inner])
        self.order = [(block, option) for _, block, _, _, option in self._outer.steps]

    def least(self, block: int, needs: Numbers, seconds: Numbers, copying: Numbers) -> Numbers:
        """Least time of ways whose blocks from `block` on are decided.

        Args:
            block: the last decided one.
            needs: bytes that the ways take beyond their room, without undecided blocks.
            seconds, copying: that they take.
        """
        return self._mean(seconds, copying) + self._outer.least(block, needs)

    def least_inside(self, block: int, needs: Numbers, seconds: Numbers, copying: Numbers) -> Numbers:
        """The same while the highest of the undecided blocks runs."""
        if block <= self._inner:
            return self._mean(seconds, copying)
        return self._mean(seconds, copying) + self._within.least(block, needs + self._runs)

    def _mean(self, seconds: Numbers, copying: Numbers) -> Numbers:
        mean: Numbers = self._weight * (self._seconds + seconds) + (1 - self._weight) * copying
        return mean

    def root(self, needs: float) -> float:
        """The bound before anything is decided."""
        nothing = np.zeros(1)
        return float(self.least(len(self._outer.bases), np.array([needs]), nothing, nothing)[0])


def relaxed(options: Sequence[Sequence[Option]], in_flight: int, room: float, seconds: float) -> Relaxation:
    """The relaxation under the best weight.

    Example:
        >>> relaxed([options_of(costs, block, 4, 25e9) for block in range(8)], 4, room=2**30, seconds=0.1)

    Args:
        options: of every block.
        in_flight: micro-batches.
        room: bytes beside what stays.
        seconds: of the stage where all blocks keep what they save.
    """
    rests = np.array([each[0].rests for each in options])
    runs = np.array([each[0].runs for each in options])
    inner = int((np.cumsum(rests) - rests + runs).argmax())

    def at(weight: float) -> Relaxation:
        return Relaxation(options, in_flight, seconds, inner, weight)

    if not any(option.copying for each in options for option in each):
        return at(1.0)
    # The peak where all keep what they save exceeds the room by what must be saved, at most once per micro-batch.
    peak = (in_flight - 1) * rests.sum() + (np.cumsum(rests) - rests + runs).max()
    needs = float(peak - room - in_flight * rests.sum())
    # The bound is concave in the weight.
    low, high = 0.0, 1.0
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = at(left).root(needs), at(right).root(needs)
    for _ in range(_STEPS):
        if at_left < at_right:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = at(right).root(needs)
        else:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = at(left).root(needs)
    return at((low + high) / 2)
