"""Storages that may be one: what they take in every possible stage.

Storages that share a value count once in a stage, and a copy of a part of a tensor is one with it where both are.
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

Change = tuple[int, int, int, int, int, int]
"""What an event changes in a matrix of stages.

First row, one past the last row, first column, one past the last column; highest rise on the way, change in the end.
"""


def shared_values(timeline: Timeline, places: Sequence[int]) -> dict[int, SharedValue]:
    """By storage, the tensors that it may be one with; storages that are one with no other are left out.

    Example:
        >>> sorted(shared_values(timeline, places=[0, 1, NOWHERE]))
        [0, 1]

    Args:
        timeline: storage events.
        places: for every storage its unit, `EVERYWHERE` or `NOWHERE`.
    """
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
    clusters = (SharedValue(timeline, places, found) for found in members.values() if len(found) > 1)
    return {storage: cluster for cluster in clusters for storage in cluster.members}


# Rows and columns of a matrix of cells, as slices or as a mask.
_Cells = tuple[slice, slice] | NDArray[np.bool_]


class SharedValue:
    """Bytes that storages which may be one take in every stage.

    Only their own units matter: all stages that hold the same of them form one cell. Cell `[a, b]` stands for the
    stages that hold their units `a` to `b - 1`. In a cell, a copy of a part that lies with its whole is one with it;
    all others are one with those of their value.

    Args:
        timeline: of the profile.
        places: unit of each tensor's owner, or `EVERYWHERE`.
        members: the storages.
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

    def change(self, storage: int, size: int, *, born: bool, units: int) -> Iterator[Change]:
        """What the birth or death of one of the storages changes, as rectangles of equal change.

        Args:
            storage: which.
            size: bytes.
            born: whether it is its birth.
            units: how many the chain has.
        """
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

    def _rectangles(self, difference: Matrix, shift: int, units: int) -> Iterator[Change]:
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
