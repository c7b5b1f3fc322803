"""What the CPU's own allocator holds in each phase of a run, from the memory events of `torch.profiler`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

Mark = Callable[[str], None]
_MARK = "phase: "


@dataclass
class Counted:
    """What a run held.

    Attributes:
        peaks: most bytes at once by the name of a phase.
        without: the same, but for the scratch of the operations that were named.
        scratch: most bytes that one call of each of those took inside and gave back before it ended.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    without: dict[str, int] = field(default_factory=dict)
    scratch: dict[str, int] = field(default_factory=dict)

    def peak(self, step: int, phase: str, without_scratch: bool = False) -> int:
        """Most bytes at once in a phase of a step, "forward+backward" or "optimizer"."""
        peaks = self.without if without_scratch else self.peaks
        return max(peaks[f"step {step} {part}"] for part in phase.split("+"))


def count(run: Callable[[Mark], None], scratch_of: Collection[str] = ()) -> Counted:
    """Run with the allocator watched; what was allocated before is not counted.

    Args:
        run: is given a function that says where a phase begins; phases of the same name are one.
        scratch_of: operations, such as "aten::mm", whose scratch is told apart.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(_begin)
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    events = sorted(_events(results.experimental_event_tree(), scratch_of, None), key=lambda event: event.at)
    counted = Counted()
    inside = _taken_inside(events, counted)
    phase, held, kept = "", 0, 0
    for number, event in enumerate(events):
        phase = event.phase or phase
        held += event.nbytes
        kept += 0 if number in inside else event.nbytes
        counted.peaks[phase] = max(counted.peaks.get(phase, 0), held)
        counted.without[phase] = max(counted.without.get(phase, 0), kept)
    return counted


def _begin(phase: str) -> None:
    with record_function(_MARK + phase):
        pass


@dataclass(frozen=True)
class _Event:
    """The begin of a phase, or bytes taken (positive) or given back.

    Attributes:
        at: time.
        phase: that begins; "" for bytes.
        nbytes: taken.
        pointer: where.
        call: (name, number) of the call, of an operation whose scratch is told apart, that it is part of.
    """

    at: int
    phase: str = ""
    nbytes: int = 0
    pointer: int = 0
    call: tuple[str, int] | None = None


def _events(tree: Any, scratch_of: Collection[str], call: tuple[str, int] | None) -> Iterator[_Event]:
    for event in tree:
        if event.typed[0].name == "Allocation":
            fields = event.typed[1]
            yield _Event(event.start_time_ns, "", fields.alloc_size, fields.ptr, call)
            continue
        if event.name.startswith(_MARK):
            yield _Event(event.start_time_ns, event.name.removeprefix(_MARK))
        within = (event.name, event.start_time_ns) if call is None and event.name in scratch_of else call
        yield from _events(event.children, scratch_of, within)


def _taken_inside(events: list[_Event], counted: Counted) -> set[int]:
    """Numbers of the events of bytes that one call took and gave back; the most of each operation is counted."""
    open_at: dict[int, int] = {}
    inside: set[int] = set()
    for number, event in enumerate(events):
        if event.nbytes > 0:
            open_at[event.pointer] = number
        elif event.nbytes < 0:
            taken = open_at.pop(event.pointer, None)
            if taken is not None and event.call is not None and events[taken].call == event.call:
                inside |= {taken, number}
    held: dict[tuple[str, int], int] = {}
    for number in sorted(inside):
        call = events[number].call
        assert call is not None
        held[call] = held.get(call, 0) + events[number].nbytes
        counted.scratch[call[0]] = max(counted.scratch.get(call[0], 0), held[call])
    return inside
