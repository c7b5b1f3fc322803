"""What every possible stage holds with several micro-batches in flight, from the storage events of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.shared_values import NOWHERE, Matrix
from autobalance.partitioning.chains.stage_peaks import Reach, band, stage_windows
from autobalance.profiling.timeline import Timeline
from autobalance.schedules.launches import launch_order
from autobalance.timelines.meeting import least
from autobalance.timelines.micro_batches import interleaved
from autobalance.timelines.passes import passes_of


@dataclass(frozen=True)
class _Peaks:
    """Peaks of every stage in bytes.

    Attributes:
        first: while the first micro-batch runs, whose backward makes the gradients.
        later: while a further one runs, whose backward adds to them.
        at_rest: what a micro-batch keeps between its forward and its backward.
        others: while none runs.
    """

    first: Matrix
    later: Matrix
    at_rest: Matrix
    others: Matrix


@dataclass
class StageMemory:
    """Peaks of all stages of a chain; lower bounds where gradients of one tensor meet.

    Example:
        >>> StageMemory(profile.timeline, chain, blocks=12).peaks(frozenset())[0, 2]

    Attributes:
        timeline: storage events of a step of one micro-batch.
        chain: units and items.
        blocks: how many there are.
        micro_batches: how many the step has.
        training: whether they have backwards.
        reach: stages of interest; entries of others are too small. None: all are.
    """

    timeline: Timeline
    chain: Chain
    blocks: int
    micro_batches: int = 1
    training: bool = True
    reach: Reach | None = None
    _banded: dict[tuple[frozenset[int], int], _Peaks] = field(default_factory=dict, repr=False)
    _known: dict[frozenset[int], _Peaks] = field(default_factory=dict, repr=False)

    def banded(self, here: frozenset[int], in_flight: int, width: int) -> Matrix:
        """The same peaks as a table: entry `[k, d]` is about the stage `[k, k + d + 1)`.

        Args:
            here: items.
            in_flight: micro-batches whose saved bytes the stage holds.
            width: units of the longest stage of the table.
        """
        if (here, width) not in self._banded:
            known = self._peaks(here)
            of_one = {id(matrix): band(matrix, width, 0) for matrix in vars(known).values()}
            self._banded[here, width] = _Peaks(*(of_one[id(matrix)] for matrix in vars(known).values()))
        return self._together(self._banded[here, width], in_flight)

    def empty(self, here: frozenset[int]) -> int:
        """Peak of a device that holds nothing but the items `here`."""
        if not here:
            return 0
        corner = _Peaks(*(matrix[:1, :1] for matrix in vars(self._peaks(here)).values()))
        return int(self._together(corner, 1)[0, 0])

    def peaks(self, here: frozenset[int], in_flight: int = 1) -> Matrix:
        """Peak bytes of every stage on whose device the items `here` are.

        Others than the micro-batch that runs are at rest meanwhile: they add what they keep.

        Args:
            here: items.
            in_flight: micro-batches whose saved bytes the stage holds.
        """
        return self._together(self._peaks(here), in_flight)

    def _peaks(self, here: frozenset[int]) -> _Peaks:
        if here not in self._known:
            self._known[here] = self._measure(here)
        return self._known[here]

    def _together(self, known: _Peaks, in_flight: int) -> Matrix:
        if self.micro_batches == 1:
            return known.others
        # Once a backward has made the gradients, as many are in flight again only if micro-batches are left.
        waiting = in_flight - 1 if self.micro_batches > in_flight else max(0, in_flight - 2)
        running: Matrix = np.maximum(
            known.first + (in_flight - 1) * known.at_rest, known.later + waiting * known.at_rest
        )
        return np.maximum(running, known.others, out=running)

    @cached_property
    def _repeated(self) -> Timeline:
        if self.micro_batches == 1 or self._is_alike:
            return self.timeline
        # The second micro-batch stands for all further ones.
        order = launch_order("naive", 1, 2, training=self.training)
        return interleaved(self.timeline, self.blocks, [(0, self.blocks)], order)

    @property
    def _is_alike(self) -> bool:
        """Whether all micro-batches do the same: none makes what the others find there."""
        return not (self.timeline.gradients or self.timeline.casts or self.timeline.scratch)

    @cached_property
    def _least(self) -> tuple[Timeline, dict[int, tuple[int, int]]]:
        return least(self._repeated)

    def _measure(self, here: frozenset[int]) -> _Peaks:
        bound, held_with_both = self._least
        places, both = self.chain.places(bound.owners, here), {}
        for storage, blocks in held_with_both.items():
            lower, upper = sorted(self.chain.places(blocks, here))
            places[storage] = NOWHERE if lower == NOWHERE else upper
            if lower >= 0:
                places[storage], both[storage] = NOWHERE, (lower, upper)
        count = len(self.chain.units)
        if self.micro_batches == 1:
            (whole, _), *_ = stage_windows(bound, places, count, both, reach=self.reach)
            return _Peaks(whole, whole, whole, whole)
        cuts, roles = _windows(bound, self.training, is_alike=self._is_alike)
        found: dict[str, Matrix] = {}
        at_rest: Matrix = np.zeros((count + 1, count + 1), dtype=np.int64)
        before = at_rest
        for (peaks, held), role in zip(stage_windows(bound, places, count, both, cuts, self.reach), roles, strict=True):
            found[role] = np.maximum(found[role], peaks) if role in found else peaks
            if role == _LATER_FORWARD:
                at_rest = np.maximum(at_rest, held - before)
            before = held
        later = np.maximum(found[_LATER_FORWARD], found.get(_LATER_BACKWARD, found[_LATER_FORWARD]))
        if _FIRST_FORWARD not in found:
            return _Peaks(later, later, at_rest, found[_OTHER])
        first = np.maximum(found[_FIRST_FORWARD], found.get(_FIRST_BACKWARD, found[_FIRST_FORWARD]))
        return _Peaks(first, later, at_rest, found[_OTHER])


_OTHER, _FIRST_FORWARD, _FIRST_BACKWARD, _LATER_FORWARD, _LATER_BACKWARD = (
    "other",
    "first forward",
    "first backward",
    "later forward",
    "later backward",
)


def _windows(timeline: Timeline, training: bool, *, is_alike: bool) -> tuple[list[int], list[str]]:
    """Where windows of a timeline of steps with two micro-batches, or one like all, begin, and what each of them is."""
    cuts, roles = [], [_OTHER]
    for number, each in enumerate(passes_of(timeline, training)):
        is_later = is_alike or number % 2 == 1
        cuts.append(each.start)
        roles.append(_LATER_FORWARD if is_later else _FIRST_FORWARD)
        if training:
            cuts.append(each.back)
            roles.append(_LATER_BACKWARD if is_later else _FIRST_BACKWARD)
        cuts.append(each.stop)
        roles.append(_OTHER)
    return cuts, roles
