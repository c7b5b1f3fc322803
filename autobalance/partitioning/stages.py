"""Exact peaks of every possible stage at once.

The units of a chain lie in call order; a stage holds the units `[i, j)`. A single pass over the storage events keeps,
for all stages side by side, the bytes that each would hold now: a storage of unit `u` counts in the stages with
`i <= u < j`, which are a rectangle of the matrix. Storages that share a value count once in a stage, so that the birth
of one adds only to the stages that hold no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.timeline import Timeline

EVERYWHERE = -1
"""Place of a storage that is on the device of the stage, whichever stage that is."""
NOWHERE = -2
"""Place of a storage that is on another device than the stage."""

Matrix = NDArray[np.int64]

# First row, one past the last row, first column, one past the last column; highest rise on the way, change in the end.
_Change = tuple[int, int, int, int, int, int]


def stage_peaks(timeline: Timeline, places: Sequence[int], units: int) -> Matrix:
    """Peak bytes of every stage `[i, j)`, equal to what `replay` gives for a device that holds just that stage.

    Example:
        >>> stage_peaks(timeline, places=[0, 0, 1, 2], units=3)[0, 2]

    Args:
        timeline: storage events.
        places: for every storage its unit, `EVERYWHERE` or `NOWHERE`.
        units: length of the chain.

    Returns:
        A matrix of `units + 1` rows and columns; entry `[i, j]` with `i <= j` is the peak of stage `[i, j)` in bytes.
        Entries below the diagonal mean nothing.
    """
    live = np.zeros((units + 1, units + 1), dtype=np.int64)
    peaks = np.zeros_like(live)
    for top, bottom, left, right, rise, change in _changes(timeline, places, units):
        now = live[top:bottom, left:right]
        # A peak can only lie right before bytes fall, so that is the only time to look.
        if change < rise:
            highest = peaks[top:bottom, left:right]
            np.maximum(highest, now + rise, out=highest)
        now += change
    return np.maximum(peaks, live, out=peaks)


def _changes(timeline: Timeline, places: Sequence[int], units: int) -> Iterator[_Change]:
    shared = _shared_values(timeline, places)
    # Consecutive events of one place act on the same rectangle: only their highest sum and their total matter.
    place, rise, change = NOWHERE, 0, 0
    for event in timeline.events:
        storage = abs(event) - 1
        here = places[storage]
        if here == NOWHERE:
            continue
        size = timeline.sizes[storage]
        group = shared.get(timeline.values[storage])
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
            yield from group.change(here, size, born=event > 0, units=units)
    if place != NOWHERE:
        yield _rectangle(place, units, rise, change)


def _rectangle(place: int, units: int, rise: int, change: int) -> _Change:
    if place == EVERYWHERE:
        return 0, units + 1, 0, units + 1, rise, change
    return 0, place + 1, place + 1, units + 1, rise, change


def _shared_values(timeline: Timeline, places: Sequence[int]) -> dict[int, _SharedValue]:
    members: dict[int, list[int]] = {}
    for value, place in zip(timeline.values, places, strict=True):
        if value >= 0 and place != NOWHERE:
            members.setdefault(value, []).append(place)
    return {value: _SharedValue(found) for value, found in members.items() if len(found) > 1}


class _SharedValue:
    """Bytes that the storages of one value take in every stage.

    Only its own units matter: all stages that hold the same of them form one cell. Cell `[a, b]` stands for the stages
    that hold its units `a` to `b - 1`.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self.units = sorted({place for place in places if place != EVERYWHERE})
        cells = len(self.units) + 1
        self.alive = np.zeros((cells, cells), dtype=np.int64)
        self.taken = np.zeros((cells, cells), dtype=np.int64)

    def change(self, place: int, size: int, *, born: bool, units: int) -> Iterator[_Change]:
        """What the birth or death of a storage of this value changes, as rectangles of equal change."""
        if place == EVERYWHERE:
            cells = (slice(None), slice(None))
        else:
            index = self.units.index(place)
            cells = (slice(0, index + 1), slice(index + 1, None))
        alive, taken = self.alive[cells], self.taken[cells]
        if born:
            difference = np.where(alive == 0, size, 0)
            alive += 1
        else:
            alive -= 1
            difference = np.where(alive == 0, -taken, 0)
        taken += difference
        yield from self._rectangles(difference, cells[1].start or 0, units)

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
