"""What every stage costs on every kind of device: the tables that the search works on.

A table has a row for each unit `k` to begin with and a column for each length: entry `[k, d]` is about the stage
`[k, k + d + 1)`. Stages longer than the table is wide are not of interest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.shared_values import Matrix
from autobalance.partitioning.chains.stage_memory import StageMemory
from autobalance.partitioning.chains.stage_peaks import Reach

if TYPE_CHECKING:  # which searches these tables
    from autobalance.partitioning.chains.step_time import Timed

Table = NDArray[np.float64]

InFlight = Callable[[int], int]
"""Micro-batches in flight in a stage, by the number of stages from it to the end."""


def in_flight_of(schedule: str, micro_batches: int) -> InFlight:
    """How many micro-batches are in flight, by the number of stages from one on to the end.

    Example:
        >>> in_flight_of("1f1b", 8)(3)
        3

    Args:
        schedule: its name.
        micro_batches: parts of the batch.
    """
    if schedule == "1f1b":
        return lambda left: min(micro_batches, left)
    if schedule in ("gpipe", "looped"):
        return lambda left: micro_batches
    return lambda left: 1


@dataclass
class Tables:
    """Use and seconds of every stage on every kind.

    Attributes:
        kinds: of devices.
        chain: what is cut.
        memory: peaks of the stages; None: they hold nothing.
        seconds: `[kind][unit]`: seconds of a micro-batch in a unit, there and back.
        beside: `[kind]`: seconds of what lies on the device beside the chain.
        arriving: `[kind][before, k, d]`: seconds of what comes into a stage, by the kind before it.
        in_flight: by the number of stages to the end.
        width: units of the longest stage of interest.
        reach: stages that are of interest; None: all are.
        floor: seconds that a step takes at least, however it is cut.
        limit: seconds within which the lightest way is wanted; None: nearly the least of these tables.
        hard: False lets devices go over their budgets.
        known: `(kind, in flight, start, stop)` -> bytes that a replay found more than the tables say.
        fastest: number of micro-batches -> the fastest way, once it is known.
    """

    kinds: tuple[Kind, ...]
    chain: Chain
    memory: StageMemory | None
    seconds: Sequence[NDArray[np.float64]]
    beside: Sequence[float]
    arriving: Sequence[Table]
    in_flight: InFlight
    width: int
    reach: Reach | None = None
    floor: float = 0.0
    limit: float | None = None
    hard: bool = True
    known: Mapping[tuple[int, int, int, int], int] = field(default_factory=dict)
    fastest: dict[int, Timed | None] = field(default_factory=dict, repr=False)
    _by_length: dict[int, tuple[Table, Table]] = field(default_factory=dict, repr=False)
    _uses: dict[tuple[int, int], Table] = field(default_factory=dict, repr=False)
    _times: dict[int, Table] = field(default_factory=dict, repr=False)

    @property
    def units(self) -> int:
        """Length of the chain."""
        return len(self.chain.units)

    @property
    def counts(self) -> tuple[int, ...]:
        """Devices of each kind."""
        return tuple(len(kind.devices) for kind in self.kinds)

    def use(self, kind: int, left: int) -> Table:
        """Peak / budget; infinite where the stage is not allowed there.

        Args:
            kind: of the device.
            left: stages from this one to the end.
        """
        held = self.in_flight(left)
        if (kind, held) not in self._uses:
            self._uses[kind, held] = self._measure(kind, held)
        return self._uses[kind, held]

    def time(self, kind: int, left: int) -> Table:
        """`[before, k, d]`: seconds of a stage for one micro-batch, with its transfers, by the kind before it.

        Args:
            kind: of the device.
            left: stages from this one to the end.
        """
        return self.plain_time(kind)

    def use_by_length(self, kind: int, left: int) -> Table:
        """`[d, k]`: the uses, by the length of the stage."""
        return self._turned(self.use(kind, left))

    def time_by_length(self, kind: int, left: int) -> Table:
        """`[d, before, k]`: the seconds, by the length of the stage."""
        return self._turned(self.time(kind, left))

    def _turned(self, table: Table) -> Table:
        """A table with its last axis first; the tables given are kept, so that one is known by where it lies."""
        if id(table) not in self._by_length:
            self._by_length[id(table)] = table, np.ascontiguousarray(np.moveaxis(table, -1, 0))
        return self._by_length[id(table)][1]

    def plain_time(self, kind: int) -> Table:
        """The same where all blocks keep what they save, which does not depend on what is in flight."""
        if kind not in self._times:
            sums = np.concatenate([[0.0], np.cumsum(self.seconds[kind])])
            stops = np.minimum(np.arange(self.units)[:, None] + np.arange(self.width)[None] + 1, self.units)
            computed = sums[stops] - sums[:-1, None] + self.beside[kind]
            self._times[kind] = computed[None] + self.arriving[kind]
        return self._times[kind]

    @cached_property
    def shortest(self) -> float:
        """Seconds of the shortest stage."""
        return min(float(self.plain_time(kind).min()) for kind in range(len(self.kinds)))

    def base(self, kind: int) -> float:
        """Peak / budget of a device that holds no stage.

        Args:
            kind: of the device.
        """
        return self._bases[kind]

    @cached_property
    def _bases(self) -> list[float]:
        empty = [0 if self.memory is None else self.memory.empty(kind.items) for kind in self.kinds]
        return [
            float(self._relative(np.array([[held]]), kind)[0, 0]) for held, kind in zip(empty, self.kinds, strict=True)
        ]

    def peaks(self, kind: int, held: int) -> Matrix:
        """`[k, d]`: bytes of every stage on a kind.

        Args:
            kind: of the device.
            held: micro-batches in flight.
        """
        here = self.kinds[kind]
        peaks = np.zeros((self.units, self.width), dtype=np.int64)
        if self.memory is not None:
            peaks = self.memory.banded(here.items, held, self.width)
        larger = {
            (start, stop - start - 1): more
            for (place, count, start, stop), more in self.known.items()
            if (place, count) == (kind, held) and stop - start <= self.width
        }
        if larger:
            peaks = peaks.copy()  # the memory gives the same array to whoever asks
            for at, more in larger.items():
                peaks[at] += more
        return peaks

    def _measure(self, kind: int, held: int) -> Table:
        uses = self._relative(self.peaks(kind, held), self.kinds[kind])
        uses[~self.allowed(kind)] = np.inf
        return uses

    def allowed(self, kind: int) -> NDArray[np.bool_]:
        """`[k, d]`: stages that a kind may hold, whatever they take."""
        here = self.kinds[kind]
        starts = np.arange(self.units)[:, None]
        stops = starts + np.arange(self.width)[None] + 1
        ends = np.full(self.units, self.units) if self.reach is None else np.array(self.reach.last)
        allowed: NDArray[np.bool_] = stops <= ends[:, None]
        for unit in self.chain.bound:
            inside = (starts <= unit) & (unit < stops)
            allowed &= inside if unit in here.units else ~inside
        return allowed

    def _relative(self, peaks: Matrix, here: Kind) -> Table:
        held = np.where(peaks > 0, peaks + here.excess, 0)
        # A device without any budget may still stay empty; the divisor only has to keep the order.
        uses: Table = held / float(max(1, here.budget))
        if self.hard:
            uses[held > here.budget] = np.inf
        return uses
