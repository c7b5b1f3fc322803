"""What rests on the host between forward and backward where blocks offload, and which of their calls bring it back.

A block that is called several times may be given what it has made itself, or the same tensor again: each of its calls
sends that to the host, and each backward brings back one of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from autobalance.profiling.timeline import Timeline
from autobalance.timelines.calls import Call


@dataclass
class Rest:
    """A storage that backwards use.

    Attributes:
        storage: its number.
        gone: how many events there were when something beside these backwards used it last.
        calls: whose backwards use it, in the order of these.
    """

    storage: int
    gone: int = 0
    calls: list[Call] = field(default_factory=list)

    @property
    def brought_back(self) -> list[Call]:
        """Calls whose backward does not find it on the device."""
        return [call for call in self.calls if call.back >= self.gone]


def rests_of(timeline: Timeline, calls: Iterable[Call]) -> list[Rest]:
    """Storages that rest on the host where calls offload what their backwards use.

    Example:
        >>> [rest.storage for rest in rests_of(profile.timeline, profile.timeline.calls)]

    Args:
        timeline: of the calls.
        calls: that offload.
    """
    found: dict[int, Rest] = {}
    given: dict[int, list[Call]] = {}
    made: set[int] = set()
    for call in calls:
        for storage in (*call.saved, *call.borrowed):
            found.setdefault(storage, Rest(storage)).calls.append(call)
        for storage, until in zip(call.saved, call.until, strict=True):
            found[storage].gone = max(found[storage].gone, until)
        made.update(call.saved)
        for storage in call.inputs:
            given.setdefault(storage, []).append(call)
            found.setdefault(storage, Rest(storage))
    deaths = timeline.lives[1].tolist()
    for storage, those in given.items():
        # What a backward releases without having read it was saved for it as well.
        last, rest = max(those, key=lambda call: call.back), found[storage]
        if storage not in made and last not in rest.calls and deaths[storage] > last.back:
            rest.calls.append(last)
    marks = [position for _, position in timeline.marks]
    return [
        _in_order(rest, given.get(rest.storage, []))
        for rest in found.values()
        if rest.calls and deaths[rest.storage] < _end(marks, rest, len(timeline.events))
    ]


def _in_order(rest: Rest, given: list[Call]) -> Rest:
    gone = max([rest.gone, *(call.stop for call in (*given, *rest.calls))])
    return Rest(rest.storage, gone, sorted(rest.calls, key=lambda call: call.back))


def _end(marks: list[int], rest: Rest, events: int) -> int:
    """The end of the backward that lets go of a storage, unless somebody has kept it."""
    after = bisect_right(marks, max(call.back for call in rest.calls))
    return marks[after] if after < len(marks) else events
