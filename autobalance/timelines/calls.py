"""Calls of blocks: when each ran forward, what its backward used of that, and when it began."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One forward of a block that has a backward.

    Example:
        >>> Call(block=2, start=40, stop=52, back=97, inputs=(18,), saved=(19, 21), until=(52, 52))

    Attributes:
        block: its index.
        start: number of events before the forward, when its inputs are there.
        stop: number of events after it.
        back: number of events before its backward used anything of the forward.
        inputs: storages that it was given, on its device.
        saved: storages that it made, and its backward used.
        until: for each of these, how many events there were when something beside the backwards of calls of the block
            used it last.
        kept: storages that the trace does not have, and that hold its inputs where it is recomputed.
        borrowed: storages that it did not make, and its backward used: inputs, and casts of the block's weights.
        through: how many events there were when the last operation of its backward was carried out; 0 where the ends of
            what it saved tell that.
    """

    block: int
    start: int
    stop: int
    back: int
    inputs: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    until: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    borrowed: tuple[int, ...] = ()
    through: int = 0

    def check(self, storages: int, events: int) -> None:
        """Refuse a call that speaks of what is not there.

        Args:
            storages: how many there are.
            events: how many there are.

        Raises:
            ValueError: a storage or an event that does not exist, or not one end for each saved storage.
        """
        for storage in (*self.inputs, *self.saved, *self.kept, *self.borrowed):
            if not 0 <= storage < storages:
                raise ValueError(f"a call speaks of storage {storage}, but there are {storages} storages")
        if not 0 <= self.start <= self.stop <= self.back <= events or max((*self.until, self.through)) > events:
            raise ValueError(
                f"a call of block {self.block} runs from event {self.start} to {self.stop} and comes back at "
                f"{self.back}, but there are {events} events"
            )
        if len(self.until) != len(self.saved):
            raise ValueError(f"a call has {len(self.saved)} saved storages and {len(self.until)} ends of their use")
