"""The least step time, by branch and bound on the longest stage.

A step of `m` micro-batches takes all its stages once and the longest `m - 1` times more (Zheng et al., "Alpa", OSDI
2022). With the longest limited, the rest is a sum, which a dynamic programme minimises; between two limits, the sum at
the looser and the tighter limit together are a lower bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autobalance.partitioning.chains.sweep import Costs, Path, Sweep
from autobalance.partitioning.chains.tables import Table, Tables

PRECISION = 1e-12
"""Share by which step times may differ that are the same: sums of floating point numbers depend on their order."""
_FINITE = float(np.finfo(np.float64).max)


@dataclass(frozen=True)
class Timed:
    """A way to cut the chain.

    Attributes:
        seconds: of its step.
        path: its stages.
        least_sum: no way has a smaller sum of its stages.
    """

    seconds: float
    path: Path
    least_sum: float


@dataclass(frozen=True)
class _Sum:
    """The least sum under a limit of the longest stage, and how long that is."""

    total: float
    longest: float
    path: Path


class Fastest:
    """Searches step times under a limit of the uses.

    Example:
        >>> Fastest(tables, micro_batches=8).search()

    Args:
        tables: of the stages.
        micro_batches: parts of the batch.
        most: largest use that is allowed.
    """

    def __init__(self, tables: Tables, micro_batches: int, most: float = np.inf) -> None:
        self._tables = tables
        self._more = micro_batches - 1
        self._most = most
        self._allowed: dict[tuple[int, int], tuple[Costs, Table]] = {}

    def search(self, enough: float = -np.inf, limit: float = np.inf) -> Timed | None:
        """The fastest way, or the first one found that takes no more than `enough`.

        Args:
            enough: seconds with which the search may end.
            limit: seconds above which no way is of interest.

        Returns:
            None where there is no way, or none of interest.
        """
        loosest = self._least_sum(np.inf)
        if loosest is None:
            return None
        best = self._timed(loosest)
        if self._more and best.seconds > enough:
            best = self._refine(loosest, best, enough, limit)
        best = replace(best, least_sum=loosest.total)
        return best if best.seconds <= limit * (1 + PRECISION) else None

    def seconds_of(self, path: Path) -> float:
        """Seconds of a step that is cut that way.

        Args:
            path: stages.
        """
        times = list(self._times(path))
        beside = self._tables.beside
        used = {kind for kind, _, _ in path}
        alone = sum(seconds for kind, seconds in enumerate(beside) if kind not in used)
        return sum(times) + alone + self._more * max([*times, *beside])

    def within(self, limit: float, least: float) -> Path | None:
        """A way that takes no more than a limit, if there is one.

        A way whose longest stage takes `t` has a sum of at least that of the limit `t`. So each sum that is found
        limits the longest stage further, until a way keeps the limit or none is left.

        Args:
            limit: seconds.
            least: no sum of stages is below that.
        """
        if not self._more:
            found = self._least_sum(np.inf)
            return found.path if found is not None and found.total <= limit else None
        longest = (limit - least) / self._more
        # What lies beside the chain is part of every way, however short the stages are.
        shortest = max([self._tables.shortest, *self._tables.beside]) * (1 - 2 * PRECISION)
        while longest >= shortest:
            found = self._least_sum(longest)
            if found is None:
                return None
            if self._timed(found).seconds <= limit:
                return found.path
            # Rounding must not leave the longest stage where it is.
            longest = min((limit - found.total) / self._more, min(found.longest, longest) * (1 - PRECISION))
        return None

    def _refine(self, loosest: _Sum, best: Timed, enough: float, limit: float) -> Timed:
        tightest = self._least_sum(self._least_longest)
        assert tightest is not None, "the limit was taken from a way"
        best = min(best, self._timed(tightest), key=lambda timed: timed.seconds)
        # Open intervals of the longest stage, with the least sum up to their upper ends.
        waiting = [(-np.inf, tightest.longest, loosest.longest, loosest.total)]
        while waiting and best.seconds > enough:
            bound, low, high, total = heapq.heappop(waiting)
            if bound >= min(best.seconds, limit) * (1 - PRECISION):
                break
            middle = self._between(low, high)
            if middle is None:
                continue
            found = self._least_sum(middle)
            assert found is not None, "looser limits than the tightest leave a way"
            best = min(best, self._timed(found), key=lambda timed: timed.seconds)
            for interval in ((low, found.longest, found.total), (middle, high, total)):
                if (bound := self._bound(*interval)) < best.seconds * (1 - PRECISION):
                    heapq.heappush(waiting, (bound, *interval))
        return best

    @cached_property
    def _least_longest(self) -> float:
        """The least possible longest stage in seconds; infinite where there is no way."""
        longest = Sweep(self._tables.counts, self._tables.units, self._cost, "max").value
        return max(longest, max(self._tables.beside, default=0.0))

    def _bound(self, low: float, high: float, total: float) -> float:
        """No way whose longest stage lies between the two is faster than that."""
        above = np.searchsorted(self._lengths, low, side="right")
        if above == len(self._lengths) or self._lengths[above] >= high:
            return np.inf
        return total + self._more * float(self._lengths[above])

    def _between(self, low: float, high: float) -> float | None:
        """A length of some stage between two others, near the middle."""
        first = int(np.searchsorted(self._lengths, low, side="right"))
        last = int(np.searchsorted(self._lengths, high, side="left")) - 1
        if first > last:
            return None
        middle = int(np.searchsorted(self._lengths, (low + high) / 2, side="right")) - 1
        return float(self._lengths[min(max(middle, first), last)])

    @cached_property
    def _lengths(self) -> Table:
        most = min(sum(self._tables.counts), self._tables.units)
        every = {
            id(table): table
            for kind in range(len(self._tables.kinds))
            for left in range(1, most + 1)
            for table in [self._tables.time(kind, left)]
        }
        lengths = np.unique(np.concatenate([*(table.ravel() for table in every.values()), self._tables.beside]))
        finite: Table = lengths[np.isfinite(lengths)]
        return finite

    def _timed(self, found: _Sum) -> Timed:
        return Timed(found.total + self._more * found.longest, found.path, found.total)

    def _least_sum(self, limit: float) -> _Sum | None:
        tables = self._tables
        limited: dict[tuple[int, int], Costs] = {}

        def cost(kind: int, left: int) -> Costs:
            key = kind, tables.in_flight(left)
            if key not in limited:
                allowed, least = self._allowed_within(kind, left)
                lengths = np.flatnonzero(least <= limit)
                seconds = allowed[: int(lengths[-1]) + 1 if len(lengths) else 1]
                # What lies beside the chain takes its time wherever it is.
                beside = tables.beside[kind]
                limited[key] = np.where(seconds <= limit, seconds - beside if beside else seconds, np.inf)
            return limited[key]

        sweep = Sweep(tables.counts, tables.units, cost, "sum")
        if not np.isfinite(sweep.value):
            return None
        path = sweep.path
        longest = max([*self._times(path), *tables.beside])
        return _Sum(sweep.value + sum(tables.beside), longest, path)

    def _times(self, path: Path) -> Iterator[float]:
        before = -1
        for number, (kind, start, stop) in enumerate(path):
            time = self._tables.time(kind, len(path) - number)
            yield float(time[before if len(time) > 1 else 0, start, stop - start - 1])
            before = kind

    def _cost(self, kind: int, left: int) -> Costs:
        """Seconds of the stages whose use is allowed, by their length."""
        return self._allowed_within(kind, left)[0]

    def _allowed_within(self, kind: int, left: int) -> tuple[Costs, Table]:
        """Seconds of the stages whose use is allowed, by their length, and the least of each length."""
        key = kind, self._tables.in_flight(left)
        if key not in self._allowed:
            uses, times = self._tables.use_by_length(kind, left), self._tables.time_by_length(kind, left)
            allowed = uses <= min(self._most, _FINITE)
            lengths = np.flatnonzero(allowed.any(axis=1))
            longest = int(lengths[-1]) + 1 if len(lengths) else 1
            seconds = np.where(allowed[:longest, None], times[:longest], np.inf)
            self._allowed[key] = seconds, seconds.min(axis=(1, 2))
        return self._allowed[key]
