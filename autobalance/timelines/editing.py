"""Changes to a timeline: storages that are new, events that are left out, and events that are put between others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property

import numpy as np

from autobalance.profiling.timeline import Timeline, Whole
from autobalance.timelines.fans import NOBODY


class EditedTimeline:
    """A timeline that is being changed: new storages at the end, events left out and put in.

    Example:
        >>> edited = EditedTimeline(timeline, timeline.homes([0, 1], root=1))
        >>> edited.put(7, edited.add(like=3, home=1) + 1)
        >>> changed, homes = edited.finished()

    Args:
        timeline: as it was; without its fans when it is finished.
        homes: device of every storage.

    Attributes:
        timeline, homes: as given.
        births, deaths: events of every storage; one past all others for never.
    """

    def __init__(self, timeline: Timeline, homes: Whole) -> None:
        self.timeline = timeline
        self.homes = homes
        self.births, self.deaths = timeline.lives
        self._like: list[int] = []
        self._places: list[int] = []
        self._values: list[int] = []
        self._wholes: list[int] = []
        self._without: set[int] = set()
        self._after: dict[int, list[int]] = {}

    @cached_property
    def uses(self) -> Counter[int]:
        """How many arrivals of all fans each storage is a term of."""
        arrivals = (arrival for fan in self.timeline.fans for arrival in fan.arrivals)
        return Counter(storage for arrival in arrivals for storage in set(arrival.terms))

    def add(self, like: int, home: int, *, same: bool = False) -> int:
        """A new storage.

        Args:
            like: has its size.
            home: its device.
            same: whether it holds the same tensor as `like`.
        """
        self._like.append(like)
        self._places.append(home)
        self._values.append(self.timeline.values[like] if same else NOBODY)
        self._wholes.append(self.timeline.wholes[like] if same and self.timeline.wholes else NOBODY)
        return len(self.timeline.sizes) + len(self._like) - 1

    def leave_out(self, position: int) -> None:
        """Drop an event; nothing where the position is beyond the last one, which stands for never."""
        self._without.add(position)

    def put(self, position: int, *events: int) -> None:
        """Put events after the one at a position.

        Args:
            position: of the event.
            events: as a timeline has them.
        """
        self._after.setdefault(position, []).extend(events)

    def finished(self) -> tuple[Timeline, Whole]:
        """The changed timeline, and the devices of its storages."""
        old = self.timeline
        events: list[int] = []
        start = 0
        shifts = np.zeros(len(old.events) + 1, dtype=np.int64)
        for position in sorted({*self._after, *self._without}):
            if position >= len(old.events):
                break
            events.extend(old.events[start:position])
            kept = () if position in self._without else (old.events[position],)
            inserted = (*kept, *self._after.get(position, ()))
            events.extend(inserted)
            shifts[position + 1 :] += len(inserted) - 1
            start = position + 1
        events.extend(old.events[start:])
        made = {
            name: (*getattr(old, name), *(getattr(old, name)[each] for each in self._like))
            for name in ("sizes", "owners", "fixed", "per_sample")
            if getattr(old, name)
        }
        changed = replace(
            old,
            **made,
            values=(*old.values, *self._values),
            wholes=(*old.wholes, *self._wholes) if old.wholes else (),
            events=tuple(events),
            marks=tuple((name, position + int(shifts[position])) for name, position in old.marks),
            emptied=tuple(position + int(shifts[position]) for position in old.emptied),
            fans=(),
            calls=(),
        )
        return changed, np.concatenate([self.homes, np.array(self._places, dtype=np.int64)])
