"""Where a timeline runs forward and backward, and which part of that belongs to which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autobalance.profiling.timeline import ROOT, Timeline, Whole

_EVALUATES = (": validation_step", ": test_step", ": predict_step")


@dataclass(frozen=True)
class Pass:
    """One forward and the backward that follows it.

    Attributes:
        start: first event of the forward.
        back: first event of the backward; `stop` without one.
        stop: one past its last event.
    """

    start: int
    back: int
    stop: int


def passes_of(timeline: Timeline, training: bool) -> tuple[Pass, ...]:
    """All passes of all steps, by the marks of the timeline.

    Example:
        >>> passes_of(Profile.from_costs([4, 4], [1, 1]).timeline, training=True)
        (Pass(start=2, back=8, stop=14),)

    Args:
        timeline: storage events.
        training: whether a forward has a backward.

    Raises:
        ValueError: there are none, or one has no backward, or has one that should not.
    """
    ends = [*(position for _, position in timeline.marks[1:]), len(timeline.events)]
    kinds = [_kind(name, training) for name, _ in timeline.marks]
    found = []
    for number, (kind, (_, start)) in enumerate(zip(kinds, timeline.marks, strict=True)):
        if kind != "forward":
            continue
        last = number
        while last + 1 < len(kinds) and kinds[last + 1] == "backward":
            last += 1
        back = stop = ends[last]
        if last > number:
            back = timeline.marks[number + 1][1]
            if kinds[last + 1 : last + 2] == ["forward"]:
                stop = _without_next_batch(timeline, back, stop)
        found.append(Pass(start, back, stop))
    known = ", ".join(name for name, _ in timeline.marks) or "none"
    if not found:
        raise ValueError(f"no mark of the timeline says where a step's forward begins; its marks are: {known}")
    if any((each.back < each.stop) != training for each in found):
        asked, has = ("backwards", "no backward") if training else ("forwards alone", "backwards")
        raise ValueError(f"the launch order has {asked}, but a forward of the timeline has {has}; marks: {known}")
    return tuple(found)


def _kind(mark: str, training: bool) -> str:
    """`"forward"`, `"backward"` or another word; beside training, batches that are evaluated are taken whole."""
    if not training and mark.endswith(_EVALUATES):
        return "forward"
    return mark.split()[-1] if mark.startswith("step ") else ""


def _without_next_batch(timeline: Timeline, back: int, stop: int) -> int:
    """The end of a backward after which only the next batch arrives on the root device."""
    storages, born = timeline.event_columns
    deaths = timeline.lives[1]
    position = stop
    for at in range(stop - 1, back - 1, -1):
        if born[at]:
            if timeline.owners[storages[at]] != ROOT or deaths[storages[at]] < stop:
                break
            position = at
    return position


def parts_of(timeline: Timeline, each: Pass, stages: Sequence[tuple[int, int]]) -> tuple[Whole, Whole]:
    """Where every stage's part of a pass begins.

    In the forward that is where the first storage of any of its blocks, or of a later one, is born: a block is sent its
    input before it runs. In the backward it is at the first birth after the last one of any later stage's blocks.

    Example:
        >>> forward, backward = parts_of(profile.timeline, passes[0], [(0, 2), (2, 4)])

    Args:
        timeline: storage events.
        each: the pass.
        stages: first block, and one past the last, of every stage.

    Returns:
        Bounds of the forward's parts in the order of stages, and of the backward's parts from the last stage to the
        first; both end with the end of all.
    """
    storages, born = timeline.event_columns
    owners = timeline.owner_column[storages]
    forward = [each.start]
    for start, _ in stages[1:]:
        later = np.flatnonzero(born[each.start : each.back] & (owners[each.start : each.back] >= start))
        forward.append(each.start + int(later[0]) if len(later) else each.back)
    backward = [each.back]
    births = each.back + np.flatnonzero(born[each.back : each.stop])
    for start, _ in reversed(stages[1:]):
        later = births[owners[births] >= start]
        following = births[births > later[-1]] if len(later) else births
        backward.append(int(following[0]) if len(following) else each.stop)
    return np.array([*forward, each.back]), np.array([*backward, each.stop])
