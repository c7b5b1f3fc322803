"""Fans: a tensor that goes to several blocks, and its gradients that come back and are added where it was made.

A trace has every block apart, so each gradient is copied back by itself. Blocks of a fan that share a device share one
copy of the tensor there; their gradients are added on that device, and one copy of the sum comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

NOBODY = -1
"""Stands for a storage that there is not."""


@dataclass(frozen=True)
class Arrival:
    """One gradient of a fan, on its way to where the tensor was made.

    Attributes:
        brought: the storage in which it arrives.
        added: the storage that was made by adding it there; `NOBODY` for the first, and where it was added in place.
        given: the storage of the copy that the block was given; `NOBODY` for a gradient that needs no copy.
        terms: storages of the gradients that the block itself adds to that one, in order.
        sums: for each term, the storage that was made by adding it; `NOBODY` as for `added`.
        since: number of events before the first term is there.
        until: number of events before the first term is read for the last time by anything but its addition.
    """

    brought: int
    added: int = NOBODY
    given: int = NOBODY
    terms: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    since: int = 0
    until: int = 0

    @property
    def storages(self) -> Iterator[int]:
        """All that it speaks of, `NOBODY` among them."""
        yield from (self.brought, self.added, self.given, *self.terms, *self.sums)


@dataclass(frozen=True)
class Fan:
    """The gradients of one tensor, in the order in which they arrive where it was made.

    Example:
        >>> Fan((Arrival(brought=7, given=3, terms=(6,), sums=(-1,), since=12), Arrival(brought=9, added=10)))

    Attributes:
        arrivals: to the first, later ones are added.
    """

    arrivals: tuple[Arrival, ...]

    @property
    def total(self) -> int:
        """The storage of the sum of all."""
        total = self.arrivals[0].brought
        for arrival in self.arrivals:
            total = total if arrival.added == NOBODY else arrival.added
        return total

    @property
    def storages(self) -> Iterator[int]:
        """All storages that it speaks of."""
        return (storage for arrival in self.arrivals for storage in arrival.storages if storage != NOBODY)

    def renumbered(self, storages: Mapping[int, int], events: Sequence[int]) -> Fan:
        """The same fan in another timeline.

        Args:
            storages: new number of each storage.
            events: for each number of events, how many there are by then in the other timeline.
        """
        numbers = {NOBODY: NOBODY, **storages}
        return Fan(
            tuple(
                Arrival(
                    brought=numbers[arrival.brought],
                    added=numbers[arrival.added],
                    given=numbers[arrival.given],
                    terms=tuple(numbers[term] for term in arrival.terms),
                    sums=tuple(numbers[total] for total in arrival.sums),
                    since=events[arrival.since],
                    until=events[arrival.until],
                )
                for arrival in self.arrivals
            )
        )

    def check(self, storages: int, events: int) -> None:
        """Refuse a fan that speaks of what is not there.

        Args:
            storages: how many there are.
            events: how many there are.

        Raises:
            ValueError: no arrivals, a storage or an event that does not exist, or not one sum for each term.
        """
        if not self.arrivals:
            raise ValueError("a fan has no arrivals")
        for arrival in self.arrivals:
            for storage in arrival.storages:
                if not NOBODY <= storage < storages or arrival.brought < 0:
                    raise ValueError(f"a fan speaks of storage {storage}, but there are {storages} storages")
            if len(arrival.terms) != len(arrival.sums):
                raise ValueError(f"a fan has {len(arrival.terms)} terms and {len(arrival.sums)} sums of one gradient")
            for position in (arrival.since, arrival.until):
                if not 0 <= position <= events:
                    raise ValueError(f"a fan speaks of event {position}, but there are {events} events")
