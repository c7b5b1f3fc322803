"""What every possible stage holds with several micro-batches in flight, from the storage events of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.shared_values import NOWHERE, Matrix
from autobalance.partitioning.chains.stage_peaks import Reach, band, stage_windows
from autobalance.profiling.timeline import Timeline
from autobalance.schedules.launches import Launch, launch_order
from autobalance.timelines.meeting import least
from autobalance.timelines.micro_batches import with_launches_marked
from autobalance.timelines.passes import passes_of


@dataclass(frozen=True)
class _Peaks:
    """Peaks of every stage in bytes, of micro-batches of which one other is at rest meanwhile, or none.

    Attributes:
        forward: of the first forward, with none at rest; it makes what the others find there.
        forward_beside: of a further one, beside one at rest.
        backward_beside: of the first backward, which makes the gradients.
        forward_later: of a forward when the gradients are there.
        backward_later: of a further backward, which adds to them.
        backward_alone: of the last one, with none at rest.
        at_rest: what a micro-batch keeps between its forward and its backward.
        others: while none runs.
    """

    forward: Matrix
    forward_beside: Matrix
    backward_beside: Matrix
    forward_later: Matrix
    backward_later: Matrix
    backward_alone: Matrix
    at_rest: Matrix
    others: Matrix


@dataclass
class StageMemory:
    """Peaks of all stages of a chain; lower bounds where gradients of one tensor meet.

    Micro-batches overlap and are parts of one batch: a single stage that holds all blocks, where one follows the other,
    may hold one of them less on the root device.

    Example:
        >>> StageMemory(profile.timeline, chain, blocks=12).peaks(frozenset())[0, 2]

    Attributes:
        timeline: storage events of a step of one micro-batch.
        chain: units and items.
        blocks: how many there are.
        micro_batches: how many the step has.
        training: whether they have backwards.
        is_one_graph: whether one backward goes through all of them, once all forwards are through.
        reach: stages of interest; entries of others are too small. None: all are.
    """

    timeline: Timeline
    chain: Chain
    blocks: int
    micro_batches: int = 1
    training: bool = True
    is_one_graph: bool = False
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
        """Peak of a device that holds nothing but the items `here`.

        Args:
            here: items on the device.
        """
        return self.peak(here, 1, 0, 0) if here else 0

    def peak(self, here: frozenset[int], in_flight: int, start: int, stop: int) -> int:
        """Peak of the stage `[start, stop)`, as `peaks` has it.

        Args:
            here: items.
            in_flight: micro-batches whose saved bytes the stage holds.
            start: first unit.
            stop: one past the last unit.
        """
        entries = (matrix[start : start + 1, stop : stop + 1] for matrix in vars(self._peaks(here)).values())
        return int(self._together(_Peaks(*entries), in_flight)[0, 0])

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
        more = in_flight - 2  # at rest, beyond the one that the peaks were taken with
        # Peaks that are the same for all micro-batches are one matrix: they count once.
        beside = [known.backward_beside, *([known.forward_beside] if in_flight > 1 else [])]
        if self.micro_batches > in_flight:
            beside += [known.forward_later, known.backward_later]
        at_once, *others = {id(matrix): matrix for matrix in beside}.values()
        for matrix in others:
            at_once = np.maximum(at_once, matrix)
        peaks: Matrix = at_once + more * known.at_rest
        for matrix in (known.others, known.forward, known.backward_alone):
            np.maximum(peaks, matrix, out=peaks)
        if self.micro_batches == in_flight > 1:
            np.maximum(peaks, known.backward_later + (more - 1) * known.at_rest, out=peaks)
        return peaks

    @cached_property
    def _repeated(self) -> Timeline:
        if self.micro_batches == 1:
            return self.timeline
        if self._is_alike:
            passes = passes_of(self.timeline, self.training)
            found = [(("forward 0", each.start), ("backward 0", each.back), ("", each.stop)) for each in passes]
            return replace(self.timeline, marks=tuple(mark for marks in found for mark in marks))
        # Two are in flight, and a third one, if there is one, finds gradients; they stand for all.
        count = min(self.micro_batches, 3)
        if self.is_one_graph or not self.training:
            order = list(launch_order("gpipe", 1, count, training=self.training))
        else:
            order = [Launch(0, 0, False), Launch(0, 1, False), Launch(0, 0, True)]
            order += [Launch(0, number, False) for number in range(2, count)]
            order += [Launch(0, number, True) for number in range(1, count)]
        return with_launches_marked(self.timeline, self.blocks, [(0, self.blocks)], order)

    @property
    def _is_alike(self) -> bool:
        """Whether all micro-batches do the same: none makes what others find there, so that one tells of all."""
        return self.training and not (self.timeline.gradients or self.timeline.casts or self.timeline.scratch)

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
            return _Peaks(*[whole] * len(fields(_Peaks)))
        cuts = [position for _, position in bound.marks]
        names = ["", *(name for name, _ in bound.marks)]
        found: dict[str, Matrix] = {}
        at_rest: Matrix = np.zeros((count + 1, count + 1), dtype=np.int64)
        before = at_rest
        for (peaks, held), name in zip(stage_windows(bound, places, count, both, cuts, self.reach), names, strict=True):
            found[name] = np.maximum(found[name], peaks) if name in found else peaks
            if name == ("forward 0" if self._is_alike else "forward 1"):
                at_rest = np.maximum(at_rest, held - before)
            before = held
        return self._named(found, at_rest)

    def _named(self, found: dict[str, Matrix], at_rest: Matrix) -> _Peaks:
        """Peaks by launch as what they are; what there is none of is nothing."""
        if self._is_alike:
            forward, backward = found["forward 0"], found["backward 0"]
            beside = forward + at_rest, backward + at_rest
            return _Peaks(forward, *beside, *beside, backward, at_rest, found[""])
        nothing, count = np.zeros_like(at_rest), min(self.micro_batches, 3)
        numbers = list(reversed(range(count))) if self.is_one_graph else list(range(count))
        first, *between, last = (found.get(f"backward {number}", nothing) for number in numbers)
        return _Peaks(
            forward=found["forward 0"],
            forward_beside=found["forward 1"],
            # Of one graph, all others are at rest when the first backward begins.
            backward_beside=first - (count - 2) * at_rest if self.is_one_graph else first,
            forward_later=found.get("forward 2", nothing) if self.training and not self.is_one_graph else nothing,
            backward_later=between[0] if between else nothing,
            backward_alone=last,
            at_rest=at_rest,
            others=found[""],
        )
