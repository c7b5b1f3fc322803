"""Where gradients of one tensor meet under an assignment.

In a trace with every block apart, each gradient of a fan is copied to where the tensor was made, and added there.
Blocks that share another device share one copy of the tensor; their gradients are added there as they are made, and
their sum is copied once the last of them is in it. That moves a few storages from one device to another and from one
instant to another, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autobalance.profiling.timeline import Timeline, Whole
from autobalance.timelines.editing import EditedTimeline
from autobalance.timelines.fans import NOBODY, Arrival, Fan
from autobalance.timelines.sharing import any_joins_at_home, groups_of, is_at_home

# Events of one addition: the sum is born, and both of its terms die.
_SUM_AND_TERMS = 2


def as_met(timeline: Timeline, homes: Whole) -> tuple[Timeline, Whole]:
    """The storages and events of a trace as they are where blocks of its fans share devices.

    Example:
        >>> met, homes = as_met(profile.timeline, profile.timeline.homes([0, 1, 1, 1], root=1))
        >>> met.peaks(homes, devices=2)

    Args:
        timeline: storage events, with every block apart.
        homes: device of every storage.

    Returns:
        Timeline and devices, with new storages at the end; as given where nothing meets that was apart.
    """
    edited: EditedTimeline | None = None
    for fan in timeline.fans:
        groups = groups_of(timeline, fan, homes)
        if groups or any_joins_at_home(fan, homes):
            edited = edited or EditedTimeline(timeline, homes)
            _Meeting(edited, fan, groups).rewrite()
    return (timeline, homes) if edited is None else edited.finished()


def least(timeline: Timeline) -> tuple[Timeline, dict[int, tuple[int, int]]]:
    """Storages and events of which every device holds at least as much as `as_met` says, under any assignment.

    Of gradients that meet, only those count that are on any device that holds both of two blocks, and the sum of all.

    Example:
        >>> bound, held_with_both = least(profile.timeline)

    Args:
        timeline: storage events, with every block apart.

    Returns:
        A timeline, and the two blocks for each storage that counts only where both are.
    """
    if not timeline.fans:
        return timeline, {}
    edited = EditedTimeline(timeline, np.zeros(len(timeline.sizes), dtype=np.int64))
    both: dict[int, tuple[int, int]] = {}
    for fan in timeline.fans:
        both.update(_Meeting(edited, fan, {}).forget())
    return edited.finished()[0], both


class _Meeting:
    """The gradients of one fan, told anew.

    Args:
        edited: is changed.
        fan: the fan.
        groups: arrivals that are added on another device, by each of them.
    """

    def __init__(self, edited: EditedTimeline, fan: Fan, groups: dict[int, list[int]]) -> None:
        self._edited = edited
        self._fan = fan
        self._groups = groups
        self._total = fan.total
        self._in_place = all(arrival.added == NOBODY for arrival in fan.arrivals)
        self._sum: int | None = None  # what holds the gradients where the tensor was made
        self._sums: dict[int, int] = {}  # what holds those of a group, by its first arrival

    def rewrite(self) -> None:
        """Tell which storages hold the gradients of the fan, and when."""
        self._forget_old()
        for number, arrival in enumerate(self._fan.arrivals):
            group = self._groups.get(number)
            if group is None and self._sum is not None and is_at_home(arrival, self._edited.homes):
                self._sum = self._join(number, self._sum)
                continue
            if group is None:
                if arrival.given != NOBODY:
                    self._put(self._moment(arrival), born=[arrival.brought])
                self._arrive(number)
                continue
            self._meet_away(number, group)
            if number == group[-1]:
                moment = self._moment(arrival)
                self._put(moment, born=[arrival.brought], dies=[self._sums.pop(group[0])])
                self._arrive(number)

    def forget(self) -> dict[int, tuple[int, int]]:
        """Keep only what takes memory on every device that holds two blocks, and the sum of all.

        Returns:
            The two blocks, for each storage that stands for what they have added.
        """
        self._forget_old()
        arrivals = self._fan.arrivals
        if self._total not in {arrival.brought for arrival in arrivals if arrival.given == NOBODY}:
            self._put(self._instant(len(arrivals) - 1), born=[self._total])
        for number, arrival in enumerate(arrivals):
            self._pass_on(number)
            if arrival.given == NOBODY and arrival.brought != self._total and self._dies_when_added(number):
                self._edited.leave_out(int(self._edited.births[arrival.brought]))
                self._edited.leave_out(int(self._edited.deaths[arrival.brought]))
        held = {}
        for earlier, later in pairwise(arrivals):
            start, stop = self._moment(earlier), self._moment(later)
            if self._share(earlier, later) and self._ends(earlier) < stop:
                storage = self._edited.add(earlier.brought, 0)
                self._put(max(start, self._ends(earlier)), born=[storage])
                self._put(stop - 1, dies=[storage])
                owners = self._edited.timeline.owners
                held[storage] = owners[earlier.given], owners[later.given]
        return held

    def _share(self, one: Arrival, other: Arrival) -> bool:
        """Whether two blocks share a copy of the tensor, on whichever device both are."""
        births, deaths = self._edited.births, self._edited.deaths
        if NOBODY in (one.given, other.given):
            return False
        return bool(births[one.given] < deaths[other.given] and births[other.given] < deaths[one.given])

    def _ends(self, arrival: Arrival) -> int:
        """When the block's own gradient dies, which is one with its copy."""
        own = next((total for total in arrival.sums[::-1] if total != NOBODY), arrival.terms[0])
        return int(self._edited.deaths[own])

    def _forget_old(self) -> None:
        edited = self._edited
        for arrival in self._fan.arrivals:
            replaced = [arrival.added] if arrival.given == NOBODY else [arrival.brought, arrival.added]
            for storage in replaced:
                if storage == NOBODY:
                    continue
                edited.leave_out(int(edited.births[storage]))
                if storage != self._total:
                    edited.leave_out(int(edited.deaths[storage]))

    def _arrive(self, number: int) -> None:
        """A gradient is where the tensor was made: it is the first there, or it is added."""
        brought, instant = self._fan.arrivals[number].brought, self._instant(number)
        is_last = number == len(self._fan.arrivals) - 1
        if self._sum is None:
            self._sum = brought
        elif self._in_place:
            self._let_go(instant, brought)
        else:
            home = int(self._edited.homes[brought])
            total = self._total if is_last else self._edited.add(brought, home)
            self._put(instant, born=[total])
            self._let_go(instant, self._sum)
            self._let_go(instant, brought)
            self._sum = total
        if is_last and self._sum != self._total:  # the same bytes under the name that is known later
            self._let_go(instant, self._sum)
            self._put(instant, born=[self._total])

    def _let_go(self, instant: int, storage: int) -> None:
        """Let a storage die; one that came without a copy only if nothing but the addition held it in the trace."""
        edited, arrivals = self._edited, self._fan.arrivals
        own = [number for number, arrival in enumerate(arrivals) if arrival.given == NOBODY]
        number = next((number for number in own if arrivals[number].brought == storage), None)
        if number is None:
            self._put(instant, dies=[storage])
            return
        death = int(edited.deaths[storage])
        if death < instant or self._dies_when_added(number):
            edited.leave_out(death)
            self._put(instant, dies=[storage])

    def _dies_when_added(self, number: int) -> bool:
        """Whether nothing but the addition held a gradient in the trace."""
        added = self._instant(max(1, number))  # the first is added when the second comes
        return added <= int(self._edited.deaths[self._fan.arrivals[number].brought]) <= added + _SUM_AND_TERMS

    def _meet_away(self, number: int, group: Sequence[int]) -> None:
        """A gradient joins those of its group on their device."""
        edited, arrival = self._edited, self._fan.arrivals[number]
        first = group[0]
        if number == first:
            # It is the block's own; under another name, since it lives on.
            self._sums[first] = edited.add(arrival.brought, int(edited.homes[arrival.given]), same=True)
            self._put(self._moment(arrival), born=[self._sums[first]])
        else:
            self._sums[first] = self._join(number, self._sums[first])

    def _join(self, number: int, present: int) -> int:
        """Add the terms of a gradient to what is there, and say what holds all of it then."""
        edited, arrival = self._edited, self._fan.arrivals[number]
        # Where the tensor was made, the last one makes the sum of all.
        is_last = number == len(self._fan.arrivals) - 1 and is_at_home(arrival, edited.homes)
        for term in range(len(arrival.terms)):
            if not self._in_place:
                instant = self._instant_of(number, term)
                is_total = is_last and term == len(arrival.terms) - 1
                added = self._total if is_total else edited.add(arrival.brought, int(edited.homes[arrival.given]))
                self._put(instant, born=[added])
                self._let_go(instant, present)
                present = added
        self._pass_on(number)
        if is_last and present != self._total:  # the same bytes under the name that is known later
            self._let_go(self._moment(arrival), present)
            self._put(self._moment(arrival), born=[self._total])
        return present

    def _pass_on(self, number: int) -> None:
        """Let the terms of a gradient die where they are added to what is there, and not to one another."""
        edited, arrival = self._edited, self._fan.arrivals[number]
        for total in arrival.sums:
            if total != NOBODY:
                edited.leave_out(int(edited.births[total]))
                edited.leave_out(int(edited.deaths[total]))
        for storage in arrival.terms[:1]:
            instant = max(self._instant_of(number, 0), arrival.until - 1)
            if self._is_alone(storage, arrival.brought) and instant < edited.deaths[storage]:
                edited.leave_out(int(edited.deaths[storage]))
                self._put(instant, dies=[storage])

    def _is_alone(self, storage: int, copy: int) -> bool:
        """Whether a storage is one gradient, and not several parts."""
        sizes = self._edited.timeline.sizes
        return self._edited.uses[storage] == 1 and sizes[storage] == sizes[copy]

    def _moment(self, arrival: Arrival) -> int:
        """When the trace copied a gradient."""
        return int(self._edited.births[arrival.brought])

    def _instant(self, number: int) -> int:
        """When the trace added a gradient."""
        arrival, edited = self._fan.arrivals[number], self._edited
        if arrival.added != NOBODY:
            return int(edited.births[arrival.added])
        if not number:
            return self._moment(arrival)
        death = int(edited.deaths[arrival.brought])
        return death if death < len(edited.timeline.events) else self._moment(arrival)

    def _instant_of(self, number: int, term: int) -> int:
        """When a block had a part of its gradient, and those before it were there."""
        arrival, edited = self._fan.arrivals[number], self._edited
        total, copied = arrival.sums[term], self._moment(arrival)
        if total != NOBODY:
            instant = int(edited.births[total])
        elif term:
            instant = int(edited.deaths[arrival.terms[term]])
        else:
            instant = max(int(edited.births[arrival.terms[0]]), arrival.since - 1)
            # A node lets go of what it has used before its gradients are added to others.
            events = edited.timeline.events
            while instant < copied - 1 and events[instant + 1] < 0 and -events[instant + 1] - 1 != arrival.terms[0]:
                instant += 1
        before = max((self._instant(earlier) for earlier in range(number)), default=0)
        return max(before, min(instant, copied))

    def _put(self, instant: int, *, born: Sequence[int] = (), dies: Sequence[int] = ()) -> None:
        self._edited.put(instant, *(storage + 1 for storage in born), *(-(storage + 1) for storage in dies))
