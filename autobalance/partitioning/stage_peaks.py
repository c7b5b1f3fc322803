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

from autobalance.profiling.timeline import Timeline

EVERYWHERE = -1
"""Place of a storage that is on the device of the stage, whichever stage that is."""
NOWHERE = -2
"""Place of a storage that is on another device than the stage."""
# Units that are added one by one rather than as sums over all stages.
_FEW = 3

Matrix = NDArray[np.int64]

# First row, one past the last row, first column, one past the last column; highest rise on the way, change in the end.
_Change = tuple[int, int, int, int, int, int]


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
        """Whether all its stages are among those of another."""
        return all(mine <= theirs for mine, theirs in zip(self.last, other.last, strict=True))


def stage_peaks(
    timeline: Timeline, places: Sequence[int], units: int, both: Mapping[int, tuple[int, int]] | None = None
) -> Matrix:
    """Peak bytes of every stage `[i, j)`, equal to what `replay` gives for a device that holds just that stage.

    It knows nothing of fans: where gradients of one tensor meet depends on what other stages hold.

    Example:
        >>> stage_peaks(timeline, places=[0, 0, 1, 2], units=3)[0, 2]

    Args:
        timeline: storage events.
        places: for every storage its unit, `EVERYWHERE` or `NOWHERE`.
        units: length of the chain.
        both: storages that count only in stages that hold both of two units, the first of which comes first; each holds
            a tensor of its own, and its place is `NOWHERE`.

    Returns:
        A matrix of `units + 1` rows and columns; entry `[i, j]` with `i <= j` is the peak of stage `[i, j)` in bytes.
        Entries below the diagonal mean nothing.
    """
    return next(iter(stage_windows(timeline, places, units, both)))[0]


def stage_windows(
    timeline: Timeline,
    places: Sequence[int],
    units: int,
    both: Mapping[int, tuple[int, int]] | None = None,
    cuts: Sequence[int] = (),
    reach: Reach | None = None,
) -> Iterator[tuple[Matrix, Matrix]]:
    """Peak bytes of every stage in each of several windows of time, and what it holds when the window ends.

    Example:
        >>> (before, _), (after, at_rest) = stage_windows(timeline, places, units=3, cuts=[40])

    Args:
        timeline, places, units, both: as for `stage_peaks`.
        cuts: events before which a new window begins, in order.
        reach: stages that are of interest; entries of others are too small. None: all are.

    Yields:
        For each window the peaks and what is held in the end, both as `stage_peaks` has it.
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
        self._shared = _shared_values(timeline, places)

    def between(self, start: int, stop: int) -> Iterator[_Change]:
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


def _rectangle(place: int | tuple[int, int], units: int, rise: int, change: int) -> _Change:
    if place == EVERYWHERE:
        return 0, units + 1, 0, units + 1, rise, change
    first, last = place if isinstance(place, tuple) else (place, place)
    return 0, first + 1, last + 1, units + 1, rise, change


def _shared_values(timeline: Timeline, places: Sequence[int]) -> dict[int, _SharedValue]:
    """By storage, the tensors that it may be one with."""
    # Storages of one value, and wholes with copies of their parts, form one cluster.
    leaders = list(range(len(timeline.values)))

    def leader(storage: int) -> int:
        while leaders[storage] != storage:
            leaders[storage] = leaders[leaders[storage]]
            storage = leaders[storage]
        return storage

    first_of: dict[int, int] = {}
    for storage, (value, place) in enumerate(zip(timeline.values, places, strict=True)):
        if place == NOWHERE:
            continue
        if value >= 0:
            leaders[leader(storage)] = leader(first_of.setdefault(value, storage))
        whole = timeline.wholes[storage] if timeline.wholes else -1
        if whole >= 0 and places[whole] != NOWHERE:
            leaders[leader(storage)] = leader(whole)
    members: dict[int, list[int]] = {}
    for storage, place in enumerate(places):
        if place != NOWHERE:
            members.setdefault(leader(storage), []).append(storage)
    clusters = (_SharedValue(timeline, places, found) for found in members.values() if len(found) > 1)
    return {storage: cluster for cluster in clusters for storage in cluster.members}


# Rows and columns of a matrix of cells, as slices or as a mask.
_Cells = tuple[slice, slice] | NDArray[np.bool_]


class _SharedValue:
    """Bytes that storages which may be one take in every stage.

    Only their own units matter: all stages that hold the same of them form one cell. Cell `[a, b]` stands for the
    stages that hold their units `a` to `b - 1`. In a cell, a copy of a part that lies with its whole is one with it;
    all others are one with those of their value.
    """

    def __init__(self, timeline: Timeline, places: Sequence[int], members: Sequence[int]) -> None:
        self.members = members
        self.units = sorted({places[member] for member in members if places[member] != EVERYWHERE})
        self._shape = (len(self.units) + 1, len(self.units) + 1)
        index = {unit: at for at, unit in enumerate(self.units)}
        spans = {
            member: (slice(None), slice(None))
            if places[member] == EVERYWHERE
            else (slice(0, index[places[member]] + 1), slice(index[places[member]] + 1, None))
            for member in members
        }
        # Of each storage the tensors that it is one with, and in which cells. Below 0: a tensor of one storage.
        self._regions: dict[int, list[tuple[int, _Cells]]] = {}
        tensors: dict[int, Matrix] = {}
        for member in members:
            value = timeline.values[member]
            own = value if value >= 0 else -1 - member
            whole = timeline.wholes[member] if timeline.wholes else -1
            if whole not in spans:
                self._regions[member] = [(own, spans[member])]
                continue
            here, there = np.zeros(self._shape, dtype=bool), np.zeros(self._shape, dtype=bool)
            here[spans[member]] = there[spans[whole]] = True
            of_whole = tensors.get(whole, np.full(self._shape, self._regions[whole][0][0]))
            tensors[member] = np.where(here & there, of_whole, own)
            found = np.unique(tensors[member][here]).tolist()
            self._regions[member] = [(tensor, here & (tensors[member] == tensor)) for tensor in found]
        used = {tensor for regions in self._regions.values() for tensor, _ in regions}
        self._alive = {tensor: np.zeros(self._shape, dtype=np.int64) for tensor in used}
        self._taken = {tensor: np.zeros(self._shape, dtype=np.int64) for tensor in used}

    def change(self, storage: int, size: int, *, born: bool, units: int) -> Iterator[_Change]:
        """What the birth or death of one of the storages changes, as rectangles of equal change."""
        regions = self._regions[storage]
        if len(regions) == 1 and isinstance(regions[0][1], tuple):  # most: no need to look at the other cells
            tensor, cells = regions[0]
            yield from self._rectangles(self._changed(tensor, cells, size, born), cells[1].start or 0, units)
            return
        difference = np.zeros(self._shape, dtype=np.int64)
        for tensor, cells in regions:
            difference[cells] = self._changed(tensor, cells, size, born)
        yield from self._rectangles(difference, 0, units)

    def _changed(self, tensor: int, cells: _Cells, size: int, born: bool) -> Matrix:
        alive, taken = self._alive[tensor], self._taken[tensor]
        if born:
            changed = np.where(alive[cells] == 0, size, 0)
            alive[cells] += 1
        else:
            alive[cells] -= 1
            changed = np.where(alive[cells] == 0, -taken[cells], 0)
        taken[cells] += changed
        return changed

    def _rectangles(self, difference: Matrix, shift: int, units: int) -> Iterator[_Change]:
        edges = [0, *(unit + 1 for unit in self.units), units + 1]
        for row in np.flatnonzero(difference.any(axis=1)).tolist():
            line = difference[row].tolist()
            start = 0
            while start < len(line):
                stop = start + 1
                while stop < len(line) and line[stop] == line[start]:
                    stop += 1
                # Columns left of the row's own cell belong to stages that end before they begin.
                first = max(start + shift, row)
                if line[start] and first < stop + shift:
                    amount = line[start]
                    yield edges[row], edges[row + 1], edges[first], edges[stop + shift], max(0, amount), amount
                start = stop
