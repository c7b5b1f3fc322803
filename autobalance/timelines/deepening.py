"""The timeline of a deeper model: the turns of a block are repeated, and what refers to neighbours is shifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autobalance.profiling.timeline import Timeline
from autobalance.timelines.deep_calls import calls_in_deep
from autobalance.timelines.windows import Turns, Window


class Deepening:
    """Builds a timeline with copies of one block.

    The storages of copy `j` are those of the block; what the block shares with the one before it, copy `j` shares with
    copy `j - 1`, and so on up to the block after it.

    Example:
        >>> Deepening(profile.timeline, block=2, times=29).timeline()

    Args:
        old: timeline of the shallow model.
        block: index of the block that is repeated.
        times: how often.

    Raises:
        ValueError: its neighbours differ from it, or are connected otherwise.
    """

    def __init__(self, old: Timeline, block: int, times: int) -> None:
        self._old, self._block, self._times = old, block, times
        if any(old.owners[storage] in (block, block + 1) for fan in old.fans for storage in fan.storages):
            raise ValueError("others are given the same tensor, or share what it gives, and their gradients meet")
        self._turns = Turns(old, block)
        self._windows = self._turns.find()
        self._of_block = {
            owner: [storage for storage, whose in enumerate(old.owners) if whose == owner]
            for owner in (block - 1, block, block + 1)
        }
        self._sources = list(range(len(old.sizes)))  # which old storage each new one is like
        self._owners = [owner + times if owner > block else owner for owner in old.owners]
        self._copies = [self._of_block[block]]  # by copy; copy 0 is the block itself
        for copy in range(1, times + 1):
            self._copies.append([self._add(storage, block + copy) for storage in self._copies[0]])
        self._copies.append(self._of_block[block + 1])
        # Storages of others that are born in a turn of the block: new ones for each copy, by their place in the turn.
        self._beside: dict[tuple[int, int, int], int] = {}
        self._at = 0  # number of the turn that was looked at last

    def timeline(self) -> Timeline:
        """The deeper model's, with storages numbered in the order of their births."""
        old = self._old
        events, positions = self._events()
        order = list(dict.fromkeys([*(event - 1 for event in events if event > 0), *range(len(self._sources))]))
        number = {storage: at for at, storage in enumerate(order)}
        values, wholes, scratch, casts = self._values(), self._wholes(), set(old.scratch), set(old.casts)
        columns = {
            name: tuple(getattr(old, name)[self._sources[storage]] for storage in order) if getattr(old, name) else ()
            for name in ("sizes", "fixed", "per_sample")
        }
        return Timeline(
            owners=tuple(self._owners[storage] for storage in order),
            values=tuple(values[storage] for storage in order),
            events=tuple(number[event - 1] + 1 if event > 0 else -(number[-event - 1] + 1) for event in events),
            marks=tuple((name, positions[position]) for name, position in old.marks),
            casts=tuple(at for at, storage in enumerate(order) if self._sources[storage] in casts),
            scratch=tuple(at for at, storage in enumerate(order) if self._sources[storage] in scratch),
            wholes=tuple(number.get(wholes[storage], -1) for storage in order) if old.wholes else (),
            fans=tuple(fan.renumbered(number, positions) for fan in old.fans),
            gradients=self._gradients(events, number),
            calls=tuple(
                calls_in_deep(
                    old,
                    self._block,
                    self._times,
                    self._windows,
                    positions,
                    lambda storage, copy: number[self._of_copy(storage, copy)],
                )
            ),
            **columns,
        )

    def _of_copy(self, storage: int, copy: int) -> int:
        return self._copies[copy][self._turns.ordinals[storage]] if copy else storage

    def _add(self, source: int, owner: int) -> int:
        self._sources.append(source)
        self._owners.append(owner)
        return len(self._sources) - 1

    def _events(self) -> tuple[list[int], list[int]]:
        """New events, and where each old position is now."""
        events: list[int] = []
        positions: list[int] = []
        start = 0
        for number, window in enumerate(self._windows):
            insertion = window.stop if window.rises else window.start
            self._take(start, insertion, events, positions)
            order = range(1, self._times + 1) if window.rises else range(self._times, 0, -1)
            for copy in order:
                for place in range(window.length):
                    event = self._old.events[window.start + place]
                    storage = self._in_copy(number, window, place, copy)
                    events.append(storage + 1 if event > 0 else -(storage + 1))
            start = insertion
        self._take(start, len(self._old.events), events, positions)
        return events, [*positions, len(events)]

    def _take(self, start: int, stop: int, events: list[int], positions: list[int]) -> None:
        for position in range(start, stop):
            positions.append(len(events))
            event = self._old.events[position]
            storage = self._replaced(position, abs(event) - 1)
            events.append(storage + 1 if event > 0 else -(storage + 1))

    def _in_copy(self, number: int, window: Window, place: int, copy: int) -> int:
        """The storage of a copy that stands for the one of an event in the block's own turn."""
        storage = abs(self._old.events[window.start + place]) - 1
        distance = self._old.owners[storage] - self._block
        if abs(distance) <= 1:
            return self._copies[copy + distance][self._turns.ordinals[storage]]
        born = self._turns.births[storage] - window.start
        if born >= 0:
            return self._twin(number, born, copy, storage)
        earlier = copy - 1 if window.rises else copy + 1
        if -window.length <= born and 0 < earlier <= self._times:
            return self._twin(number, born + window.length, earlier, storage)
        if -window.length <= born:
            return self._born_at(window.start + born + window.length) if window.rises else storage
        raise ValueError("its turn releases what was made long before by somebody who is no neighbour")

    def _twin(self, number: int, place: int, copy: int, storage: int) -> int:
        key = number, place, copy
        if key not in self._beside:
            self._beside[key] = self._add(storage, self._owners[storage])
        return self._beside[key]

    def _born_at(self, position: int) -> int:
        return self._old.events[position] - 1

    def _replaced(self, position: int, storage: int) -> int:
        """What an old event is about now: the next block's neighbour is the last copy, the block's is the first."""
        while self._at + 1 < len(self._windows) and position >= self._windows[self._at + 1].since:
            self._at += 1
        number, window = self._at, self._windows[self._at]
        if not window.since <= position < window.until:
            return storage
        is_own, is_later = window.start <= position < window.stop, position >= window.stop
        of_next_block = not is_own and is_later == window.rises
        owner = self._old.owners[storage]
        if is_own and owner == self._block + 1:
            return self._copies[1][self._turns.ordinals[storage]]
        if of_next_block and owner == self._block:
            return self._copies[self._times][self._turns.ordinals[storage]]
        if abs(owner - self._block) > 1:
            born = self._turns.births[storage] - window.start
            if window.rises and is_later and 0 <= born < window.length:
                return self._twin(number, born, self._times, storage)
            if not window.rises and is_own and -window.length <= born < 0:
                return self._twin(number, born + window.length, 1, storage)
        return storage

    def _gradients(self, events: Sequence[int], number: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        """When gradients are added now: as many events after their births as before."""
        births = self._turns.births
        distances = {one: births[then] - births[one] if then >= 0 else -1 for one, then in self._old.gradients}
        found = []
        for position, event in enumerate(events):
            distance = distances.get(self._sources[event - 1]) if event > 0 else None
            if distance is not None:
                following = events[position + distance] if position + distance < len(events) else 0
                found.append((number[event - 1], number[following - 1] if distance > 0 and following > 0 else -1))
        return tuple(found)

    def _values(self) -> list[int]:
        """Who holds one tensor with whom now."""
        groups: dict[int, list[int]] = {}
        for storage, value in enumerate(self._old.values):
            if value >= 0:
                groups.setdefault(value, []).append(storage)
        twins: dict[int, list[int]] = {}
        for _, twin in sorted(self._beside.items(), key=lambda item: item[0][2]):
            twins.setdefault(self._sources[twin], []).append(twin)
        values = [-1] * len(self._sources)
        regrouped = [joined for members in groups.values() for joined in self._regrouped(members, twins)]
        for value, joined in enumerate(regrouped):
            for storage in joined:
                values[storage] = value
        return values

    def _wholes(self) -> list[int]:
        """What copies of parts were copied from now."""
        old, block = self._old, self._block
        wholes = [*old.wholes, *[-1] * (len(self._sources) - len(old.wholes))] if old.wholes else []
        twins = {(self._sources[twin], copy): twin for (_, _, copy), twin in self._beside.items()}
        copies = [(storage, 0) for storage in range(len(old.wholes))]
        copies += [(storage, copy) for copy in range(1, self._times + 1) for storage in self._copies[0]]
        copies += [(storage, copy) for storage, copy in twins]
        for storage, copy in copies if old.wholes else ():
            whole, owner = old.wholes[storage], old.owners[storage]
            if whole < 0:
                continue
            distance = old.owners[whole] - block
            made = storage if not copy else twins.get((storage, copy), -1)
            if copy and owner == block:
                made = self._copies[copy][self._turns.ordinals[storage]]
            if copy and abs(distance) <= 1:
                whole = self._copies[copy + distance][self._turns.ordinals[whole]]
            elif copy:
                whole = twins.get((whole, copy), whole)
            elif owner == block and distance == 1:
                whole = self._copies[1][self._turns.ordinals[whole]]
            elif owner == block + 1 and distance == 0:
                whole = self._copies[self._times][self._turns.ordinals[whole]]
            wholes[made] = whole
        return wholes

    def _regrouped(self, members: list[int], twins: Mapping[int, list[int]]) -> list[list[int]]:
        """The storages of one tensor in the old timeline, as those of one or more tensors in the new one."""
        before, own, after = (
            [self._turns.ordinals.get(storage, -1) for storage in members if self._old.owners[storage] == owner]
            for owner in (self._block - 1, self._block, self._block + 1)
        )
        if not own:
            return [members]
        if set(own) & {*before, *after}:  # all blocks share it, such as a mask
            return [members + [copy[number] for copy in self._copies[1:-1] for number in own]]
        if before and after:
            raise ValueError("it passes on a tensor that it was given itself")
        if before:
            return [members]  # what copies are given follows from what the block gives
        beside = [storage for storage in members if abs(self._old.owners[storage] - self._block) > 1]
        if any(storage not in twins for storage in beside):
            raise ValueError("it shares a tensor with somebody who is no neighbour")
        groups = []
        for copy in range(self._times + 1):
            group = [self._copies[copy][number] for number in own]
            group += [self._copies[copy + 1][number] for number in after]
            groups.append(group + (beside if copy == 0 else [twins[storage][copy - 1] for storage in beside]))
        return groups
