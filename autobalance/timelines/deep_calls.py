"""Calls of blocks in the timeline of a deeper model: those of the repeated block, for each of its copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autobalance.profiling.timeline import Timeline
from autobalance.timelines.calls import Call
from autobalance.timelines.windows import Window


def calls_in_deep(
    old: Timeline,
    block: int,
    times: int,
    windows: Sequence[Window],
    positions: Sequence[int],
    number_of: Callable[[int, int], int],
) -> Iterator[Call]:
    """The calls of all blocks, those of the copies among them.

    Example:
        >>> tuple(calls_in_deep(old, 1, 29, windows, positions, number_of))

    Args:
        old: timeline of the shallow model.
        block: that is repeated.
        times: how often.
        windows: its turns.
        positions: for each number of old events how many there are by then in the deep model's timeline.
        number_of: new number of an old storage of a copy; copy 0 stands for those that the timeline had.
    """
    copied = _Copied(times, windows, positions)
    for call in old.calls:
        owner = call.block + times if call.block > block else call.block
        yield _renumbered(replace(call, block=owner), 0, positions.__getitem__, number_of)
        if call.block == block:
            for copy in range(1, times + 1):
                moved = copied.mover(copy)
                yield _renumbered(replace(call, block=block + copy), copy, moved, number_of)


def _renumbered(call: Call, copy: int, moved: Callable[[int], int], number_of: Callable[[int, int], int]) -> Call:
    return replace(
        call,
        start=moved(call.start),
        stop=moved(call.stop),
        back=moved(call.back),
        through=moved(call.through),
        inputs=tuple(number_of(storage, copy) for storage in call.inputs),
        saved=tuple(number_of(storage, copy) for storage in call.saved),
        until=tuple(moved(position) for position in call.until),
        kept=tuple(number_of(storage, copy) for storage in call.kept),
        borrowed=tuple(number_of(storage, copy) for storage in call.borrowed),
    )


class _Copied:
    """Where what happens in a turn of the block happens in the turn of a copy."""

    def __init__(self, times: int, windows: Sequence[Window], positions: Sequence[int]) -> None:
        self._times, self._windows, self._positions = times, windows, positions

    def mover(self, copy: int) -> Callable[[int], int]:
        """Moves a number of events to the copy's turn; what lies in no turn stays where it is."""

        def moved(position: int) -> int:
            turn = next((turn for turn in self._windows if turn.start <= position <= turn.until), None)
            if turn is None:
                return self._positions[position]
            # Copies rise after the block's turn, and fall before it.
            insertion = self._positions[turn.stop if turn.rises else turn.start]
            nth = copy - 1 if turn.rises else self._times - copy
            return insertion - (self._times - nth) * turn.length + position - turn.start

        return moved
