"""Where a block has its turn in a timeline: stretches of events that repeat, shifted by one block, in its neighbour's.

Forward passes and optimizer steps go up through equal blocks, backward passes and many releases go down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from autobalance.profiling.timeline import Timeline


@dataclass(frozen=True)
class Window:
    """One turn of a block.

    Attributes:
        start: its first event.
        length: events.
        rises: whether the block after it in call order comes next in time; otherwise the one before.
        since: first event of the turn before it.
        until: one past the turn after it.
    """

    start: int
    length: int
    rises: bool
    since: int
    until: int

    @property
    def stop(self) -> int:
        """One past its last event."""
        return self.start + self.length


class Turns:
    """The turns of a block that equals the one after it, and equals the one before it but for what that one owns alone.

    Args:
        timeline: storage events.
        block: its index.

    Attributes:
        ordinals: number of each storage among those of its owner; for the block before, where it owns more (a mask that
            all share, say), the number of the block's own storage that is like it, as far as turns tell.
        births: event at which each storage is born first.

    Raises:
        ValueError: the block and the one after it are not equal.
    """

    def __init__(self, timeline: Timeline, block: int) -> None:
        self._timeline = timeline
        self._block = block
        self._three = (block - 1, block, block + 1)
        self._storages = [abs(event) - 1 for event in timeline.events]
        self._owners = [timeline.owners[storage] for storage in self._storages]
        self.births: dict[int, int] = {}
        for position, event in enumerate(timeline.events):
            if event > 0:
                self.births.setdefault(event - 1, position)
        ordinals: dict[int, int] = {}
        sizes: dict[int, list[int]] = {}
        for storage, owner in enumerate(timeline.owners):
            of_owner = sizes.setdefault(owner, [])
            ordinals[storage] = len(of_owner)
            of_owner.append(timeline.sizes[storage])
        if sizes.get(block) != sizes.get(block + 1):
            raise ValueError("the block and the one after it do not hold the same storages")
        self._first_is_equal = sizes.get(block - 1) == sizes.get(block)
        self.ordinals = {
            storage: number
            for storage, number in ordinals.items()
            if self._first_is_equal or timeline.owners[storage] != block - 1
        }

    def find(self) -> list[Window]:
        """All turns, in order of time.

        Raises:
            ValueError: an event of the block belongs to no turn that repeats.
        """
        bounds = sorted({0, len(self._owners), *(position for _, position in self._timeline.marks)})
        return [window for start, stop in pairwise(bounds) for window in self._within(start, stop)]

    def _within(self, start: int, stop: int) -> Iterator[Window]:
        position = start
        while True:
            first = self._next(self._block, position, stop)
            if first == stop:
                return
            window = self._window_at(first, position, stop)
            yield window
            # The neighbour's turn may release what is the block's; it is no turn of the block.
            position = window.until

    def _window_at(self, first: int, since: int, stop: int) -> Window:
        before, _, after = self._three
        # The turn before may release what is the block's, whose own turn then begins with a birth.
        firsts = [first, self._next(self._block, first, stop, births=True)]
        tries = []
        for at in {at for at in firsts if at < stop}:
            for rises, ahead, behind in ((True, after, before), (False, before, after)):
                following = self._next(ahead, at, stop)
                if following < stop and (ahead == after or self._first_is_equal):
                    tries.append((following - at, rises, at, at))  # up to the next block's turn, which is alike
                for births in (False, True):
                    earlier = self._next(behind, since, at, births)
                    if earlier < at and (behind == after or self._first_is_equal):
                        tries.append((at - earlier, rises, earlier, at))  # as long as the turn before
        for length, rises, begin, at in sorted(set(tries)):
            if first >= at - length and self._repeats(begin, length, 1 if rises else -1, stop):
                return Window(at, length, rises, max(since, at - length), min(stop, at + 2 * length))
        raise ValueError(f"event {first} is the block's, but nothing like it follows or went before in its neighbours")

    def _next(self, owner: int, position: int, stop: int, births: bool = False) -> int:
        """The first event of an owner, or the first birth; `stop` where there is none."""
        try:
            found = self._owners.index(owner, position, stop)
            while births and self._timeline.events[found] < 0:
                found = self._owners.index(owner, found + 1, stop)
        except ValueError:
            return stop
        return found

    def _repeats(self, start: int, length: int, shift: int, stop: int) -> bool:
        learnt: dict[int, int] = {}
        if start + 2 * length > stop or not all(
            self._alike(position, position + length, shift, learnt) for position in range(start, start + length)
        ):
            return False
        self.ordinals.update(learnt)
        return True

    def _alike(self, one: int, other: int, shift: int, learnt: dict[int, int]) -> bool:
        """Whether two events are the same but for the block, which is `shift` further in the other."""
        events, sizes = self._timeline.events, self._timeline.sizes
        here, there = self._storages[one], self._storages[other]
        if (events[one] > 0) != (events[other] > 0) or sizes[here] != sizes[there]:
            return False
        owner, wanted = self._owners[one], self._owners[other]
        if owner in self._three and wanted in self._three:
            if wanted != owner + shift:
                return False
            for storage, model in ((here, there), (there, here)):
                if storage not in self.ordinals:
                    learnt.setdefault(storage, self.ordinals[model])
            return self._number(here, learnt) == self._number(there, learnt)
        if wanted in self._three:  # where the other has its equal neighbour, the first or last one has somebody else
            return wanted == self._block - shift
        return owner == wanted and (events[one] > 0 or one - self.births[here] == other - self.births[there])

    def _number(self, storage: int, learnt: dict[int, int]) -> int:
        return self.ordinals[storage] if storage in self.ordinals else learnt[storage]
