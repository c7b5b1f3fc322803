"""What a stretch of a timeline does to each block: what is alive before and after, and the most in between."""

from __future__ import annotations

from dataclasses import dataclass

from autobalance.profiling.timeline import ROOT, Timeline


@dataclass(frozen=True)
class Walk:
    """What a stretch of a timeline does to each owner.

    Attributes:
        before: storages alive at its start.
        born: storages born in it.
        after: storages alive at its end.
        first: bytes of each block at its start.
        last: bytes of each block at its end.
        peak: most bytes of each block at once.
    """

    before: frozenset[int]
    born: frozenset[int]
    after: frozenset[int]
    first: tuple[int, ...]
    last: tuple[int, ...]
    peak: tuple[int, ...]


def walk(timeline: Timeline, count: int, start: int, stop: int) -> Walk:
    """Follow the events from `start` to `stop`.

    Args:
        timeline: the trace.
        count: number of blocks.
        start: first event.
        stop: one past the last event.
    """
    alive: set[int] = set()
    born: set[int] = set()
    bytes_of = [0] * count
    before, first, peak = frozenset[int](), (0,) * count, [0] * count
    for index, event in enumerate(timeline.events[:stop]):
        if index == start:
            before, first, peak = frozenset(alive), tuple(bytes_of), list(bytes_of)
        storage = abs(event) - 1
        row = row_of(timeline.owners[storage], count)
        (alive.add if event > 0 else alive.discard)(storage)
        if event > 0 and index >= start:
            born.add(storage)
        if row is not None:
            bytes_of[row] += timeline.sizes[storage] if event > 0 else -timeline.sizes[storage]
            peak[row] = max(peak[row], bytes_of[row])
    if start >= stop:
        before, first, peak = frozenset(alive), tuple(bytes_of), list(bytes_of)
    return Walk(before, frozenset(born), frozenset(alive), first, tuple(bytes_of), tuple(peak))


def last_step(timeline: Timeline) -> tuple[int, int, int]:
    """Where the last step's forward and backward begin, and where the backward ends.

    Args:
        timeline: of a trace.

    Returns:
        Three positions of events.
    """
    forward = backward = 0
    stop = len(timeline.events)
    for name, index in timeline.marks:
        if name.startswith("step ") and name.endswith(" forward"):
            forward, backward, stop = index, len(timeline.events), len(timeline.events)
        elif name.startswith("step ") and name.endswith(" backward"):
            backward, stop = index, len(timeline.events)
        elif backward < len(timeline.events) and stop == len(timeline.events):
            stop = index
    return forward, min(backward, len(timeline.events)), stop


def row_of(owner: int, count: int) -> int | None:
    """The row that tells of an owner: what is on the root device stands in the last block's; None: no row.

    Args:
        owner: a block index, `ROOT` or another account.
        count: of blocks.
    """
    return count - 1 if owner == ROOT else owner if owner >= 0 else None
