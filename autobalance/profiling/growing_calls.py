"""Calls of blocks as a trace goes on: what each makes, and what of that its own backward uses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.timelines.calls import Call

if TYPE_CHECKING:
    from autobalance.profiling.tracer import Tracer


@dataclass
class _Open:
    """A call that has begun; positions are numbers of events, nodes those of autograd's."""

    block: int
    start: int
    first_node: int
    first_storage: int
    inputs: tuple[int, ...]
    outer: _Open | None
    stop: int = -1
    next_node: int = -1
    next_storage: int = -1
    back: int = -1
    through: int = 0
    used: set[int] = field(default_factory=set)
    borrowed: set[int] = field(default_factory=set)


class GrowingCalls:
    """Notes the calls of blocks, each at home in a place of its own.

    Args:
        tracer: the trace.
        is_static: whether a storage holds a parameter or a buffer.
    """

    def __init__(self, tracer: Tracer, is_static: Callable[[int], bool]) -> None:
        self._tracer = tracer
        self._is_static = is_static
        self._running: list[_Open] = []
        self._ended: list[_Open] = []
        self._first_nodes: list[int] = []
        self._made_in: dict[int, _Open] = {}
        self._used_elsewhere: dict[int, int] = {}
        self._handed_out: set[int] = set()
        self._cast: set[int] = set()
        self._stops: list[int] = []
        self._changing: set[int] = set()
        self._seen = 0

    def begins(self, block: int, given: Iterable[Tensor]) -> None:
        """A block is called; its inputs have come through its door."""
        tracer = self._tracer
        inputs = dict.fromkeys(self._of(given))
        mine = tuple(index for index in inputs if tracer.accounts[index] == block and not self._is_static(index))
        outer = self._running[-1] if self._running else None
        self._running.append(_Open(block, len(tracer.events), compat.next_number(), len(tracer.sizes), mine, outer))

    def ends(self, block: int, given_back: Iterable[Tensor]) -> None:
        """A block returns."""
        while self._running:
            call = self._running.pop()
            if call.block == block:
                break
        else:
            return
        tracer = self._tracer
        call.stop, call.next_node = len(tracer.events), compat.next_number()
        call.next_storage = len(tracer.sizes)
        for index in range(call.first_storage, call.next_storage):
            if tracer.accounts[index] == block and index not in tracer.copies:
                self._made_in.setdefault(index, call)
        self._handed_out.update(self._of(given_back))
        self._stops.append(call.stop)
        if call.next_node > call.first_node:  # else it has no backward
            at = bisect_right(self._first_nodes, call.first_node)
            self._ended.insert(at, call)
            self._first_nodes.insert(at, call.first_node)

    def saw(self, func: Any, operands: Iterable[Tensor]) -> None:
        """An operation was carried out, of which only the results have been told to the tracer yet."""
        tracer, first = self._tracer, self._seen
        self._seen = len(tracer.sizes)
        used = list(self._of(operands))
        if func is torch.ops.aten._to_copy.default and used and self._is_static(used[0]):
            self._cast.update(range(first, self._seen))
        call = self._going_back()
        if call is not None:
            call.through = len(tracer.events)
        for index in used:
            maker = self._made_in.get(index)
            borrows = call is not None and maker is not call and self._borrows(call, index, maker)
            if maker is not None and maker is not call and not borrows:
                self._used_elsewhere[index] = len(tracer.events)
                continue
            if call is None:
                continue
            if maker is call:
                call.used.add(index)
            elif borrows:
                call.borrowed.add(index)
            if call.back < 0 and (maker is call or borrows or self._is_static(index)):
                call.back = self._before(first)

    def change_others(self, block: int) -> None:
        """A block changes what it was given, or a buffer: its forward cannot run again on the same."""
        self._changing.add(block)

    def copied(self, source: torch.UntypedStorage) -> None:
        """A tensor is copied on its way to another block, or its gradient on the way back."""
        index = self._tracer.find(source)
        if index in self._made_in:
            self._used_elsewhere[index] = len(self._tracer.events)

    def finished(self, owner_of: Mapping[int, int]) -> tuple[Call, ...]:
        """All calls whose backward used something of their forward.

        Args:
            owner_of: owner by account.
        """
        self._find_unread()
        backwards = [position for name, position in self._tracer.marks if name.endswith(" backward")]

        def until(call: _Open, index: int) -> int:
            last = max(call.stop, self._used_elsewhere.get(index, 0))
            end = next((position for position in backwards if position >= call.stop), last)
            if index in self._cast:  # autocast keeps what it has made of a weight to the end of the forward
                return max(last, end)
            if index in self._handed_out and last < end:  # a caller's variables live while it calls the next block
                following = bisect_right(self._stops, last)
                return min(self._stops[following], end) if following < len(self._stops) else end
            return last

        return tuple(
            Call(
                block=owner_of[call.block],
                start=call.start,
                stop=call.stop,
                back=call.back,
                inputs=call.inputs,
                saved=tuple(sorted(call.used)),
                until=tuple(until(call, index) for index in sorted(call.used)),
                borrowed=tuple(sorted(call.borrowed)),
                through=call.through,
            )
            for call in self._ended
            if call.back >= call.stop and call.block in owner_of and call.block not in self._changing
        )

    def _find_unread(self) -> None:
        """Storages that a backward releases without having read them are saved as well, unless the caller has them."""
        events = self._tracer.events
        deaths = {-event - 1: position for position, event in enumerate(events) if event < 0}
        marks = [position for _, position in self._tracer.marks]
        for call in self._ended:
            if call.back < 0:
                continue
            after = bisect_right(marks, call.back)
            end = marks[after] if after < len(marks) else len(events)
            for index in range(call.first_storage, call.next_storage):
                is_held = call.back <= deaths.get(index, end) < end
                if is_held and self._made_in.get(index) is call and index not in self._handed_out:
                    call.used.add(index)

    def _going_back(self) -> _Open | None:
        """The call whose backward is running."""
        node = compat.current_node()
        if node is None:
            return None
        number = compat.number_of(node)
        at = bisect_right(self._first_nodes, number) - 1
        call = self._ended[at] if at >= 0 else None
        while call is not None and number >= call.next_node:
            call = call.outer
        return call

    def _borrows(self, call: _Open, index: int, maker: _Open | None) -> bool:
        """Whether a call has what it did not make: as its input, or as a cast of a weight that autocast has kept."""
        return index in call.inputs or (maker is not None and maker.block == call.block and index in self._cast)

    def _before(self, first: int) -> int:
        """How many events there were before the births of what was made last, which has numbers from `first`."""
        events, copies = self._tracer.events, self._tracer.copies
        position = len(events)
        while position and events[position - 1] > first and events[position - 1] - 1 not in copies:
            position -= 1
        return position

    def _of(self, tensors: Iterable[Tensor]) -> Iterator[int]:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                index = self._tracer.find(tensor.untyped_storage())
                if index is not None:
                    yield index
