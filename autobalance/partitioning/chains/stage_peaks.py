"""Exact peaks of every possible stage at once.

The units of a chain lie in call order; a stage holds the units `[i, j)`. A single pass over the storage events keeps,
for all stages side by side, the bytes that each would hold now: a storage of unit `u` counts in the stages with
`i <= u < j`, which are a rectangle of the matrix. Storages that share a value count once in a stage, so that the birth
of one adds only to the stages that hold no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.chains.shared_values import EVERYWHERE, NOWHERE, Change, Matrix, shared_values
from autobalance.profiling.timeline import Timeline

# Units that are added one by one rather than as sums over all stages.
_FEW = 3


@dataclass(frozen=True)
class Reach:
    """Which stages are of interest: `[i, j)` with `j <= last[i]`; both columns never fall.

    Attributes:
        first: for every unit `u` the first unit of the longest stage that ends right after it.
        last: for every unit `i` one past the last unit of the longest stage that begins with it.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    @classmethod
    def of(cls, last: Sequence[int]) -> Reach:
        """The reach with a given end for every unit to begin with.

        Example:
            >>> Reach.of([2, 3, 3]).first
            (0, 0, 1)
        """
        ends = np.maximum.accumulate(np.asarray(last, dtype=np.int64))
        first = np.searchsorted(ends, np.arange(1, len(ends) + 1))
        return cls(tuple(first.tolist()), tuple(ends.tolist()))

    @property
    def width(self) -> int:
        """Units of the longest stage."""
        return max(end - start for start, end in enumerate(self.last))

    def is_within(self, other: Reach) -> bool:
        """Whether all its stages are among those of another.

        Args:
            other: reach of the same chain.
        """
        return all(mine <= theirs for mine, theirs in zip(self.last, other.last, strict=True))


def stage_windows(
    timeline: Timeline,
    places: Sequence[int],
    units: int,
    both: Mapping[int, tuple[int, int]] | None = None,
    cuts: Sequence[int] = (),
    reach: Reach | None = None,
) -> Iterator[tuple[Matrix, Matrix]]:
    """Peak bytes of every stage `[i, j)` in each of several windows of time, and what it holds when the window ends.

    They equal what `replay` gives for a device that holds just that stage. Nothing is known here of fans: where
    gradients of one tensor meet depends on what other stages hold.

    Example:
        >>> (before, _), (after, at_rest) = stage_windows(timeline, places, units=3, cuts=[40])

    Args:
        timeline: storage events.
        places: for every storage its unit, `EVERYWHERE` or `NOWHERE`.
        units: length of the chain.
        both: storages that count only in stages that hold both of two units, the first of which comes first; each holds
            a tensor of its own, and its place is `NOWHERE`.
        cuts: events before which a new window begins, in order.
        reach: stages that are of interest; entries of others are too small. None: all are.

    Yields:
        For each window the peaks and what is held in the end: matrices of `units + 1` rows and columns, whose entry
        `[i, j]` with `i <= j` is about stage `[i, j)`, in bytes. Entries below the diagonal mean nothing.
    """
    live = np.zeros((units + 1, units + 1), dtype=np.int64)
    changes = _Changes(timeline, places, units, both or {})
    edges = [0, *cuts, len(timeline.events)]
    rises = np.zeros(units, dtype=np.int64)
    for start, stop in pairwise(edges):
        peaks = live.copy()
        for top, bottom, left, right, rise, change in changes.between(start, stop):
            # In a row of rises the order makes no difference: all of them are added at once.
            if change == rise and top == 0 and bottom == left and right == units + 1:
                rises[left - 1] += change
                continue
            _add(rises, live)
            if reach is not None:  # the rectangle without its parts that hold no stage of interest
                right = min(right, reach.last[min(bottom, units) - 1] + 1)
                top = max(top, reach.first[left - 1]) if left else top
            now = live[top:bottom, left:right]
            # A peak can only lie right before bytes fall, so that is the only time to look.
            if change < rise:
                highest = peaks[top:bottom, left:right]
                np.maximum(highest, now + rise, out=highest)
            now += change
        _add(rises, live)
        yield np.maximum(peaks, live, out=peaks), live.copy()


def band(matrix: Matrix, width: int, fill: int) -> Matrix:
    """Entries `[k, k + d + 1]` of a matrix of stages as `[k, d]`.

    Example:
        >>> band(peaks, width=4, fill=0)[2, 0] == peaks[2, 3]

    Args:
        matrix: of `n + 1` rows and columns.
        width: number of columns of the result.
        fill: for stages that end beyond the chain.
    """
    units = len(matrix) - 1
    padded = np.full((units + 1, units + 1 + width), fill, dtype=matrix.dtype)
    padded[:, : units + 1] = matrix
    row, column = padded.strides
    view = np.lib.stride_tricks.as_strided(padded[:, 1:], (units, width), (row + column, column))
    entries: Matrix = view.copy()
    return entries


def _add(rises: NDArray[np.int64], live: Matrix) -> None:
    """Add what rose in each unit to the stages that hold it, and forget it."""
    units = np.flatnonzero(rises)
    if len(units) > _FEW:
        sums = np.concatenate([[0], np.cumsum(rises)])
        live += sums[None] - sums[:, None]
    else:
        for unit in units.tolist():
            live[: unit + 1, unit + 1 :] += rises[unit]
    rises[units] = 0


class _Changes:
    """The events of a timeline as changes of rectangles of stages."""

    def __init__(
        self, timeline: Timeline, places: Sequence[int], units: int, both: Mapping[int, tuple[int, int]]
    ) -> None:
        self._timeline, self._places, self._units, self._both = timeline, places, units, both
        self._shared = shared_values(timeline, places)

    def between(self, start: int, stop: int) -> Iterator[Change]:
        """Changes from one event to another; windows have to be asked for in order."""
        timeline, places, units, both = self._timeline, self._places, self._units, self._both
        # Consecutive events of one place act on the same rectangle: only their highest sum and their total matter.
        place: int | tuple[int, int] = NOWHERE
        rise = change = 0
        for event in timeline.events[start:stop]:
            storage = abs(event) - 1
            here = both.get(storage, places[storage])
            if here == NOWHERE:
                continue
            size = timeline.sizes[storage]
            group = self._shared.get(storage)
            if group is None and here == place:
                change += size if event > 0 else -size
                rise = max(rise, change)
                continue
            if place != NOWHERE:
                yield _rectangle(place, units, rise, change)
                place, rise, change = NOWHERE, 0, 0
            if group is None:
                place = here
                change = size if event > 0 else -size
                rise = max(0, change)
            else:
                yield from group.change(storage, size, born=event > 0, units=units)
        if place != NOWHERE:
            yield _rectangle(place, units, rise, change)


def _rectangle(place: int | tuple[int, int], units: int, rise: int, change: int) -> Change:
    if place == EVERYWHERE:
        return 0, units + 1, 0, units + 1, rise, change
    first, last = place if isinstance(place, tuple) else (place, place)
    return 0, first + 1, last + 1, units + 1, rise, change
