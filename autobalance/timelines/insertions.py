"""Events that are put between those of a timeline, with new storages; quick where there are many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autobalance.profiling.timeline import Timeline
from autobalance.timelines.fans import NOBODY

# Keys of an event and of what stands before it: what ends there, marks, what begins there, the event itself.
_GRID = 4
_ENDS, _MARKS, _BEGINS = -3, -2, -1


class Insertions:
    """A timeline that is being changed.

    Example:
        >>> edit = Insertions(timeline)
        >>> edit.back(7, edit.add(like=3) + 1)
        >>> changed = edit.finished()

    Args:
        timeline: as it was.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._like: list[int] = []
        self._events = np.array(timeline.events, dtype=np.int64)
        self._kept = np.ones(len(self._events), dtype=np.bool_)
        self._keys: list[int] = []
        self._inserted: list[int] = []

    def add(self, like: int) -> int:
        """A new storage with the size and the owner of another one; nothing else holds its tensor.

        Args:
            like: number of the other one.
        """
        self._like.append(like)
        return len(self._timeline.sizes) + len(self._like) - 1

    def leave_out(self, position: int) -> None:
        """Drop an event; nothing where the position is beyond the last one, which stands for never."""
        if position < len(self._kept):
            self._kept[position] = False

    def replace(self, position: int, event: int) -> None:
        """Put an event in the place of another one.

        Args:
            position: of the event.
            event: as a timeline has them.
        """
        self._events[position] = event

    def before(self, position: int, *events: int) -> None:
        """Put events before one, and before the marks there: they end what was before.

        Args:
            position: of the event.
            events: as a timeline has them.
        """
        self._put(_GRID * position + _ENDS, events)

    def back(self, position: int, *events: int) -> None:
        """Put events before one, and after the marks there: they begin what follows.

        Args:
            position: of the event.
            events: as a timeline has them.
        """
        self._put(_GRID * position + _BEGINS, events)

    def finished(self) -> Timeline:
        """The changed timeline."""
        old = self._timeline
        positions = np.flatnonzero(self._kept)
        keys = np.concatenate([_GRID * positions, np.array(self._keys, dtype=np.int64)])
        events = np.concatenate([self._events[positions], np.array(self._inserted, dtype=np.int64)])
        order = np.argsort(keys, kind="stable")
        moved = np.searchsorted(keys[order], _GRID * np.arange(len(old.events) + 1) + _MARKS).tolist()
        scratch = set(old.scratch)
        count = len(old.sizes)
        made = {
            name: (*getattr(old, name), *(getattr(old, name)[like] for like in self._like))
            for name in ("sizes", "owners", "fixed", "per_sample")
            if getattr(old, name)
        }
        numbers = {storage: storage for fan in old.fans for storage in fan.storages}
        return replace(
            old,
            **made,
            values=(*old.values, *[NOBODY] * len(self._like)),
            wholes=(*old.wholes, *[NOBODY] * len(self._like)) if old.wholes else (),
            scratch=(*old.scratch, *(count + at for at, like in enumerate(self._like) if like in scratch)),
            events=tuple(events[order].tolist()),
            marks=tuple((name, moved[position]) for name, position in old.marks),
            emptied=tuple(moved[position] for position in old.emptied),
            fans=tuple(fan.renumbered(numbers, moved) for fan in old.fans),
            calls=(),
        )

    def _put(self, key: int, events: tuple[int, ...]) -> None:
        self._keys += [key] * len(events)
        self._inserted += events
