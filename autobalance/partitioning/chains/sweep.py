"""The dynamic programme over stages and devices, from the last stage to the first.

Devices of one kind are alike, so that a state is how many of each kind the stages from some unit on take: any order and
any subset of the devices is searched. `values[s][c, p, k]` is the least cost of the units from `k` on, cut into exactly
`s` stages on the devices that state `c` counts, when the stage before them is on kind `p`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Path = tuple[tuple[int, int, int], ...]
"""Stages in call order, as (kind, first unit, one past the last unit)."""

CostOf = Callable[[int, int], Costs]
"""From a kind and the number of stages from this one to the end to `[d, p, k]`: the cost of the stage `[k, k + d + 1)`.

`p` is the kind of the stage before it, or there is a single `p` where that makes no difference. Lengths come first,
since numpy takes the least over a first axis much faster than over a short last one.
"""

MOST_STATES = 20_000
"""Counts of devices of each kind that are told apart; above, the devices are too different to try all their orders."""


@dataclass(frozen=True)
class _Moves:
    """How the states of one level follow from those of the level before, for a stage on one kind."""

    to: NDArray[np.int64]
    came_from: NDArray[np.int64]


@dataclass(frozen=True)
class _States:
    levels: tuple[tuple[tuple[int, ...], ...], ...]
    moves: tuple[tuple[_Moves, ...], ...]


def count_states(counts: Sequence[int]) -> int:
    """How many states there are for so many devices of each kind.

    Example:
        >>> count_states([4, 4])
        25

    Args:
        counts: devices of each kind.
    """
    states = 1
    for count in counts:
        states *= count + 1
    return states


@lru_cache(maxsize=16)
def _states(counts: tuple[int, ...], most: int) -> _States:
    levels: list[list[tuple[int, ...]]] = [[] for _ in range(most + 1)]
    for state in product(*(range(count + 1) for count in counts)):
        if sum(state) <= most:
            levels[sum(state)].append(state)
    moves: list[tuple[_Moves, ...]] = [()]
    for before, level in pairwise(levels):
        index = {state: at for at, state in enumerate(before)}
        row = []
        for kind in range(len(counts)):
            pairs = [(at, index[_one_less(state, kind)]) for at, state in enumerate(level) if state[kind]]
            to, came_from = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
            row.append(_Moves(to, came_from))
        moves.append(tuple(row))
    return _States(tuple(map(tuple, levels)), tuple(moves))


def _one_less(state: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*state[:kind], state[kind] - 1, *state[kind + 1 :])


class Sweep:
    """The least cost of all ways to cut a chain, and the way that has it.

    Example:
        >>> found = Sweep((4,), units=12, cost_of=lambda kind, left: uses.T[:, None], combine="max")
        >>> found.value, found.path

    Args:
        counts: devices of each kind.
        units: length of the chain.
        cost_of: what a stage costs; infinite where it is not allowed.
        combine: `"max"`: the largest cost of the stages counts; `"sum"`: all of them together.

    Attributes:
        value: the least cost; infinite where there is no way.
    """

    def __init__(self, counts: Sequence[int], units: int, cost_of: CostOf, combine: Literal["max", "sum"]) -> None:
        self._units = units
        self._cost_of = cost_of
        self._combine = np.maximum if combine == "max" else np.add
        self._states = _states(tuple(counts), min(sum(counts), units))
        self._values: list[Costs] = []
        self._run()
        # A chain without units is cut before it begins.
        firsts = [level[:, -1, 0] for level in self._values[1 if units else 0 :]]
        self.value = min((float(first.min()) for first in firsts), default=float("inf"))

    def least_without(self, kind: int) -> float:
        """The least cost of all ways that leave the devices of one kind empty.

        Args:
            kind: whose devices stay empty.
        """
        least = float("inf")
        for states, level in zip(self._states.levels, self._values, strict=True):
            for at, state in enumerate(states):
                if not state[kind]:
                    least = min(least, float(level[at, -1, 0]))
        return least

    @property
    def path(self) -> Path:
        """The stages of the best way; of equal ones, one with the fewest stages, of these the longest first."""
        firsts = [level[:, -1, 0] for level in self._values]
        left = next(left for left, first in enumerate(firsts) if first.min() == self.value)
        state = int(firsts[left].argmin())
        unit, before, found = 0, -1, []
        while left:
            kind, stop, state = self._step(left, state, before, unit)
            found.append((kind, unit, stop))
            unit, before, left = stop, kind, left - 1
        return tuple(found)

    def _run(self) -> None:
        kinds = len(self._states.levels[1][0]) if len(self._states.levels) > 1 else 0
        places = max((self._cost_of(kind, 1).shape[1] for kind in range(kinds)), default=1)
        done = np.full((1, places, self._units + 1), np.inf)
        done[:, :, self._units] = 0.0
        self._values.append(done)
        for left in range(1, len(self._states.levels)):
            now = np.full((len(self._states.levels[left]), places, self._units + 1), np.inf)
            for kind, moves in enumerate(self._states.moves[left]):
                if not len(moves.to):
                    continue
                cost = self._cost_of(kind, left)
                after = self._values[-1][moves.came_from, kind if places > 1 else 0]
                ways = self._combine(_windows(after, cost.shape[0])[:, :, None], cost[:, None]).min(axis=0)
                now[moves.to, :, :-1] = np.minimum(now[moves.to, :, :-1], ways)
            self._values.append(now)

    def _step(self, left: int, state: int, before: int, unit: int) -> tuple[int, int, int]:
        places = self._values[0].shape[1]
        wanted = self._values[left][state, before if places > 1 else 0, unit]
        for kind, moves in enumerate(self._states.moves[left]):
            for came_from in moves.came_from[moves.to == state].tolist():
                cost = self._cost_of(kind, left)[:, before if places > 1 else 0, unit]
                after = self._values[left - 1][came_from, kind if places > 1 else 0, unit + 1 :]
                length = min(len(cost), len(after))
                stops = np.flatnonzero(self._combine(after[:length], cost[:length]) == wanted)
                if len(stops):
                    return kind, unit + 1 + int(stops[-1]), came_from
        raise AssertionError("every value comes from some stage")


def _windows(after: Costs, width: int) -> Costs:
    """`[d, c, k]`: what follows the stage `[k, k + d + 1)`; infinite beyond the end."""
    units = after.shape[1] - 1
    padded = np.full((len(after), units + width), np.inf)
    padded[:, :units] = after[:, 1:]
    row, column = padded.strides
    return np.lib.stride_tricks.as_strided(padded, (width, len(after), units), (column, row, column))
