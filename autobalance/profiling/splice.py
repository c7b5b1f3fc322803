"""The profile of a deeper model from that of a shallow one: a block in the middle of equal ones is repeated as data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import Timeline
from autobalance.profiling.windows import Turns, Window


def repeated(profile: Profile, block: str, times: int) -> Profile:
    """The profile of the same model with more of one of its equal blocks.

    Blocks before and after it must equal it, as in a stack of layers, and be connected to their neighbours only; the
    one before may own something that all share, such as a mask. Peaks are then those of a trace of the deep model, for
    any assignment.

    Example:
        >>> deep = repeated(profile, "layers.1", 29)     # 32 layers from 3

    Args:
        profile: of at least three equal blocks in a row.
        block: name of one that is neither the first nor the last of them.
        times: how many more of it there are to be.

    Returns:
        A profile whose blocks are numbered on.

    Raises:
        ValueError: there is no such block, or its neighbours differ from it or are connected otherwise.
    """
    if block not in profile.names:
        raise ValueError(f"the profile has no block {block!r}; it has {', '.join(profile.names)}")
    if times < 0:
        raise ValueError(f"times={times}; a block can be repeated 0 times or more")
    index = profile.names.index(block)
    if not 0 < index < len(profile.blocks) - 1:
        raise ValueError(f"{block!r} has no block before or after it; three equal blocks in a row are needed")
    tied = next((group for group in profile.together if index in group), None)
    if tied is not None:
        shared = ", ".join(profile.names[member] for member in tied)
        raise ValueError(f"{block!r} must share a device ({shared}), so more of it would not be independent blocks")
    if not times:
        return profile
    try:
        timeline = _Splice(profile.timeline, index, times).timeline()
    except ValueError as error:
        raise ValueError(f"{block!r} cannot be repeated: {error}") from error

    def moved(owner: int) -> int:
        return owner + times if owner > index else owner

    names = _Names(block, profile.names[index + 1], times)
    return replace(
        profile,
        blocks=_rows(profile.blocks, index, times, names),
        other_blocks=_rows(profile.other_blocks, index, times, names) if profile.other_blocks else (),
        timeline=timeline,
        together=tuple(tuple(moved(member) for member in group) for group in profile.together),
        loose=tuple((names.later(name), moved(owner)) for name, owner in profile.loose),
        notes=(*profile.notes, f"{times} more of {block} were not traced: they are taken to be like it"),
    )


def _rows(blocks: Sequence[BlockCost], index: int, times: int, names: _Names) -> tuple[BlockCost, ...]:
    copies = (replace(blocks[index], name=names.copy(number)) for number in range(1, times + 1))
    later = (replace(block, name=names.later(block.name)) for block in blocks[index + 1 :])
    return (*blocks[: index + 1], *copies, *later)


class _Names:
    """Numbers blocks on: `layers.2` becomes `layers.31` where 29 copies of `layers.1` come before it."""

    def __init__(self, name: str, following: str, times: int) -> None:
        self._name, self._times = name, times
        words, others = re.split(r"(\d+)", name), re.split(r"(\d+)", following)
        differ = [at for at, pair in enumerate(zip(words, others, strict=False)) if pair[0] != pair[1]]
        counted = len(words) == len(others) and all(
            words[at].isdecimal() and others[at].isdecimal() and int(others[at]) == int(words[at]) + 1 for at in differ
        )
        self._words, self._numbers = words, differ if counted else []

    def copy(self, number: int) -> str:
        """Name of a copy, counted from 1."""
        return self._raised(self._words, number) if self._numbers else f"{self._name} ({number} more)"

    def later(self, name: str) -> str:
        """New name of a block or tensor, which changes if it is, or is inside, a later block of the same row."""
        words = re.split(r"(\d+)", name)
        fits = self._numbers and all(
            at < len(words) and words[at].isdecimal() and int(words[at]) > int(self._words[at])
            if at in self._numbers
            else words[at : at + 1] == [word] or (word == "" and at == len(self._words) - 1)
            for at, word in enumerate(self._words)
        )
        return self._raised(words, self._times) if fits else name

    def _raised(self, words: Sequence[str], by: int) -> str:
        return "".join(str(int(word) + by) if at in self._numbers else word for at, word in enumerate(words))


class _Splice:
    """Builds a timeline with copies of one block.

    The storages of copy `j` are those of the block; what the block shares with the one before it, copy `j` shares with
    copy `j - 1`, and so on up to the block after it.
    """

    def __init__(self, old: Timeline, block: int, times: int) -> None:
        self._old, self._block, self._times = old, block, times
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
        """The deeper model's."""
        old = self._old
        events, positions = self._events()
        columns = {
            name: tuple(getattr(old, name)[source] for source in self._sources) if getattr(old, name) else ()
            for name in ("sizes", "fixed", "per_sample")
        }
        scratch = set(old.scratch)
        return Timeline(
            owners=tuple(self._owners),
            values=tuple(self._values()),
            events=tuple(events),
            marks=tuple((name, positions[position]) for name, position in old.marks),
            scratch=tuple(storage for storage, source in enumerate(self._sources) if source in scratch),
            **columns,
        )

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
