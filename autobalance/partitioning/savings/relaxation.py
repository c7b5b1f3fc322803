"""Lower bounds of what the undecided blocks of a stage still cost: their fractional knapsacks.

Time is the longer of computing and copying, hence at least any weighted mean of the two. Under one weight every option
has one price; the cheapest way to save bytes takes options in the order of price per byte, the last of them in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.savings.saving_options import Option

Numbers = NDArray[np.float64]

_GOLDEN = (5**0.5 - 1) / 2
_STEPS = 12


@dataclass(frozen=True)
class Step:
    """From one option of a block to the next one that saves more.

    Attributes:
        ratio: seconds per byte.
        block: whose options they are.
        gain: bytes that it saves.
        price: seconds, weighted.
        option: the one that it leads to.
    """

    ratio: float
    block: int
    gain: float
    price: float
    option: Option


class _Knapsack:
    """Steps from one option of a block to the next, in the order of price per byte saved.

    Args:
        options: of every block.
        factors: by which what rests of each block counts.
        weight: of computing; copying has the rest.
    """

    def __init__(self, options: Sequence[Sequence[Option]], factors: Sequence[float], weight: float) -> None:
        self._factors, self._weight = factors, weight
        bases = [factor * each[0].rests for factor, each in zip(factors, options, strict=True)]
        self.steps = steps_of(options, factors, weight)
        self._owners = np.array([step.block for step in self.steps], dtype=np.int64)
        self._ratios = np.array([step.ratio for step in self.steps])
        self._gains = np.array([step.gain for step in self.steps])
        self._prices = np.array([step.price for step in self.steps])
        self._before = np.concatenate([[0.0], np.cumsum(bases)])

    def least(self, block: int, needs: Numbers) -> Numbers:
        """Least price at which the blocks before `block` save their share; infinite where they cannot.

        Args:
            block: the first one that is decided.
            needs: bytes beyond the room without the undecided blocks.
        """
        mine = self._owners < block
        gains = np.concatenate([[0.0], np.cumsum(self._gains[mine])])
        prices = np.concatenate([[0.0], np.cumsum(self._prices[mine])])
        needs = needs + self._before[block]
        # Bytes are whole numbers below 2**53: their sums are exact.
        found: Numbers = np.where(needs > gains[-1], np.inf, np.interp(needs, gains, prices))
        return found

    def worth(self, options: Sequence[Sequence[Option]], needs: float, most: float) -> list[list[Option]]:
        """Options without which no way of at most this price saves enough: all others are too dear for what they save.

        At the price per byte of the last step that is needed, an option costs so much more than the best of its block
        that the rest would have to be cheaper than the fractional knapsack (Dantzig 1957; fixing by reduced costs).
        """
        needs = needs + float(self._before[-1])
        at = int(np.searchsorted(np.cumsum(self._gains), needs)) if needs > 0 else 0
        each = float(self._ratios[at]) if needs > 0 and at < len(self._ratios) else 0.0
        prices = [
            [self._price(option, options[block][0], factor, each) for option in options[block]]
            for block, factor in enumerate(self._factors)
        ]
        spare = most - (sum(min(some) for some in prices) + each * max(0.0, needs))
        return [
            [option for option, price in zip(some, priced, strict=True) if price - min(priced) <= spare]
            for some, priced in zip(options, prices, strict=True)
        ]

    def _price(self, option: Option, keep: Option, factor: float, each: float) -> float:
        saved = factor * (keep.rests - option.rests) + option.leaves
        return self._weight * option.seconds + (1 - self._weight) * option.copying - each * saved


def steps_of(options: Sequence[Sequence[Option]], factors: Sequence[float], weight: float) -> list[Step]:
    """Steps of all blocks in the order of price per byte.

    Example:
        >>> steps_of([options_of(costs, 0, 4, 25e9)], [4], weight=1.0)

    Args:
        options: of every block; the first keeps everything.
        factors: by which what rests of each block counts.
        weight: of computing; copying has the rest.
    """
    steps = []
    for block, (factor, each) in enumerate(zip(factors, options, strict=True)):
        steps += _hull(block, each, factor, weight)
    return sorted(steps, key=lambda step: step.ratio)


def _hull(block: int, options: Sequence[Option], factor: float, weight: float) -> list[Step]:
    """Steps of a block along the lower convex hull of its options, from keeping everything on."""
    keep = options[0]
    points = []
    for option in options[1:]:
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
    return [
        Step(_ratio(before, after), block, after[0] - before[0], after[1] - before[1], after[2])
        for before, after in pairwise(hull)
    ]


def _ratio(one: tuple[float, float, Option], other: tuple[float, float, Option]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


class Relaxation:
    """Bounds for all ways of a stage, under one weight of computing against copying.

    Args:
        options: of every block.
        in_flight: micro-batches.
        room: bytes beside what stays.
        seconds: of the stage where all blocks keep what they save.
        weight: of computing.

    Attributes:
        bound: least seconds of the stage.
    """

    def __init__(
        self, options: Sequence[Sequence[Option]], in_flight: int, room: float, seconds: float, weight: float
    ) -> None:
        self._seconds, self._weight = seconds, weight
        rests = np.array([each[0].rests for each in options])
        inside = np.cumsum(rests) - rests + np.array([each[0].runs for each in options])
        # Where all keep what they save, the stage peaks while this block runs.
        self._inner = int(inside.argmax())
        self._runs = options[self._inner][0].runs
        self._options, self._in_flight = options, in_flight
        # While a block runs, nothing of the current micro-batch rests of those after it.
        factors = [in_flight if block < self._inner else in_flight - 1 for block in range(len(options))]
        self._within = _Knapsack(options, factors, weight)
        self._needs = self._runs - room
        nothing = np.zeros(1)
        self.bound = float(self.least_inside(len(options), nothing - room, nothing, nothing)[0])

    @property
    def order(self) -> list[tuple[int, Option]]:
        """(block, option) in the order of price per byte, those first that help where the stage peaks."""
        steps = (*self._within.steps, *self._outer.steps)
        return [(step.block, step.option) for step in steps]

    @cached_property
    def _outer(self) -> _Knapsack:
        # What rests of an undecided block counts for each micro-batch, since it comes before all decided ones.
        return _Knapsack(self._options, [self._in_flight] * len(self._options), self._weight)

    def least(self, block: int, needs: Numbers, seconds: Numbers, copying: Numbers) -> Numbers:
        """Least time of ways whose blocks from `block` on are decided.

        Args:
            block: the first one that is decided.
            needs: bytes that the ways take beyond their room, without undecided blocks.
            seconds, copying: that they take.
        """
        return self._mean(seconds, copying) + self._outer.least(block, needs)

    def least_inside(self, block: int, needs: Numbers, seconds: Numbers, copying: Numbers) -> Numbers:
        """The same while the highest of the undecided blocks runs; `needs` is without the micro-batch that runs.

        Args:
            block, needs, seconds, copying: as for `least`.
        """
        if block <= self._inner:
            return self._mean(seconds, copying)
        return self._mean(seconds, copying) + self._within.least(block, needs + self._runs)

    def worth(self, options: Sequence[Sequence[Option]], target: float) -> list[list[Option]]:
        """The options of each block that a way which takes less than `target` seconds may have.

        Args:
            options: of each block.
            target: seconds.
        """
        return self._within.worth(options, self._needs, target - self._weight * self._seconds)

    def _mean(self, seconds: Numbers, copying: Numbers) -> Numbers:
        mean: Numbers = self._weight * (self._seconds + seconds) + (1 - self._weight) * copying
        return mean


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

    def at(weight: float) -> Relaxation:
        return Relaxation(options, in_flight, room, seconds, weight)

    if not any(option.copying for each in options for option in each):
        return at(1.0)
    # The bound is concave in the weight: golden section.
    low, high = 0.0, 1.0
    left, right = at(1 - _GOLDEN), at(_GOLDEN)
    for _ in range(_STEPS):
        if left.bound < right.bound:
            low, left = high - _GOLDEN * (high - low), right
            right = at(low + _GOLDEN * (high - low))
        else:
            high, right = low + _GOLDEN * (high - low), left
            left = at(high - _GOLDEN * (high - low))
    return max((left, right, at(1.0)), key=lambda relaxation: relaxation.bound)
