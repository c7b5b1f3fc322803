"""Fans while they are traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autobalance.timelines.fans import NOBODY, Arrival, Fan


@dataclass
class WayBack:
    """The way of a gradient from a block to where the tensor was made.

    Attributes:
        fan: to which it belongs.
        given: storage of the copy that the block was given.
        shape: of that copy.
        terms: storages of gradients that were added for it.
        sums: storages that these additions made.
        since: number of events before the first term was there; it grows while nothing else has come.
        brought: storage in which the gradient has arrived.
        added: storage that was made by adding it.
    """

    fan: GrowingFan
    given: int = NOBODY
    shape: tuple[int, ...] = ()
    terms: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    since: int = NOBODY
    brought: int = NOBODY
    added: int = NOBODY
    _first_from: int | None = None

    def comes(self, node: int, events: int) -> None:
        """An operation of an autograd node that adds to this gradient was seen.

        Args:
            node: its number.
            events: how many there have been.
        """
        if self._first_from is None:
            self._first_from = node
        if self._first_from == node and not self.terms:
            self.since = events

    def add(self, node: int, earlier: int, later: int, result: int) -> None:
        """Two terms have met.

        Args:
            node: number of the autograd node that has brought the later one.
            earlier: storage of what was there.
            later: storage of what has come.
            result: storage of the sum; that of `earlier` where it was added in place.
        """
        if not self.terms:
            if self._first_from == node:  # the one that brought the earlier did nothing that could be seen
                self.since = NOBODY
            self.terms.append(earlier)
            self.sums.append(NOBODY)
        self.terms.append(later)
        self.sums.append(NOBODY if result == earlier else result)

    def leaves(self, gradient: int) -> None:
        """The gradient is complete.

        Args:
            gradient: its storage.
        """
        made = next((total for total in reversed(self.sums) if total != NOBODY), self.terms[0] if self.terms else None)
        if made != gradient:  # it was passed on by something else than these additions
            self.terms, self.sums = [gradient], [NOBODY]

    def arrival(self, reads: Mapping[int, int]) -> Arrival:
        """What is known of it, for good.

        Args:
            reads: number of events before each storage is read for the last time.
        """
        until = max((reads.get(term, 0) for term in self.terms[:1]), default=0)
        terms, sums = tuple(self.terms), tuple(self.sums)
        return Arrival(self.brought, self.added, self.given, terms, sums, max(0, self.since), until)


@dataclass
class GrowingFan:
    """A tensor whose copies are given to blocks.

    Attributes:
        sent: how many copies.
        arrived: gradients that have arrived, in order.
        additions: how many of them were added to another.
    """

    sent: int = 0
    arrived: list[WayBack] = field(default_factory=list)
    additions: int = 0

    @property
    def copied(self) -> int:
        """How many gradients came from a copy."""
        return sum(way.given != NOBODY for way in self.arrived)


class GrowingFans:
    """All fans of a trace.

    Example:
        >>> fans = GrowingFans()
        >>> way = fans.send(fans.begin(), given=3, shape=(8, 8))
        >>> way.leaves(6)
        >>> fans.arrive(way, brought=7)
    """

    def __init__(self) -> None:
        self._fans: list[GrowingFan] = []
        self._of: dict[int, GrowingFan] = {}  # by storage in which gradients of a fan are, while others may join them
        self._reads: dict[int, int] = {}
        self.is_spread = False
        """Whether any tensor was given to several blocks."""

    def begin(self) -> GrowingFan:
        """A new fan."""
        self._fans.append(GrowingFan())
        return self._fans[-1]

    def send(self, fan: GrowingFan, given: int | None, shape: tuple[int, ...]) -> WayBack:
        """One more copy of the tensor is made.

        Args:
            fan: of the tensor.
            given: storage of the copy, None where it has none.
            shape: of the copy.
        """
        fan.sent += 1
        self.is_spread |= fan.sent > 1
        return WayBack(fan, NOBODY if given is None else given, shape)

    def read(self, storage: int, events: int) -> None:
        """An operation of a backward reads a storage, and does not add it to a gradient on its way back.

        Args:
            storage: that it reads.
            events: how many there have been.
        """
        self._reads[storage] = events

    def arrive(self, way: WayBack, brought: int | None) -> None:
        """The gradient of a copy is where the tensor was made.

        Args:
            way: that it took.
            brought: storage in which it is, None where it has none.
        """
        if brought is None or way.given == NOBODY:
            return
        way.brought = brought
        way.fan.arrived.append(way)
        self._of[brought] = way.fan

    def meet(self, earlier: int, later: int, result: int) -> None:
        """Two gradients of one tensor are added.

        Args:
            earlier: storage of what was there.
            later: storage of what has come.
            result: storage of the sum; one of the two where it was added in place.
        """
        fan = self._of.get(earlier, self._of.get(later))
        if fan is None:
            return
        if earlier not in self._of:  # it was there before the first copy came
            fan.arrived.insert(0, WayBack(fan, brought=earlier))
        elif later not in self._of:
            fan.arrived.append(WayBack(fan, brought=later))
        fan.additions += 1
        fan.arrived[-1].added = NOBODY if result in (earlier, later) else result
        for storage in (earlier, later):
            self._of.pop(storage, None)
        if fan.copied < fan.sent:
            self._of[result] = fan

    def finished(self) -> tuple[Fan, ...]:
        """The fans of which gradients from several blocks have met."""
        return tuple(
            Fan(tuple(way.arrival(self._reads) for way in fan.arrived))
            for fan in self._fans
            if fan.copied > 1 and fan.additions == len(fan.arrived) - 1
        )
