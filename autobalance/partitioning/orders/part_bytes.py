"""What parts of a model hold for certain, so that a linear model of memory is a lower bound of every replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.timeline import Timeline
from autobalance.timelines.meeting import least

Bytes = NDArray[np.int64]

_INSTANTS = 8


def held_by_parts(timeline: Timeline, parts: Sequence[Sequence[int]]) -> Bytes:
    """What each part holds by itself at the instants that matter most, whatever else is on its device.

    A tensor that several parts hold is counted with the one that has had it longest, a copy of a part of a tensor with
    none, since it may be a view. No device's peak is below the sum over its parts at any of the instants.

    Example:
        >>> held_by_parts(profile.timeline, parts=[(0,), (1, 2), (ROOT,)])

    Args:
        timeline: storage events of one micro-batch.
        parts: owners of each part.

    Returns:
        `[instant, part]` in bytes, (instants, parts): of the highest instant of all, and of those at which the largest
        parts are highest.
    """
    bound, held_with_both = least(timeline)
    part_of = _part_of(bound, parts)
    part_of[list(held_with_both)] = -1
    sizes, values = np.array(bound.sizes, dtype=np.int64), np.array(bound.values, dtype=np.int64)
    _, tensors = np.unique(np.where(values < 0, -1 - np.arange(len(values)), values), return_inverse=True)
    # On a device, a tensor is as large as the first of its holders there.
    smallest = np.full(len(sizes), np.iinfo(np.int64).max)
    np.minimum.at(smallest, tensors, sizes)
    births, events = bound.lives[0], np.array(bound.events, dtype=np.int64)
    held = []
    for instant in _instants(bound, part_of, len(parts)):
        before = events[: instant + 1]
        lives = np.bincount(np.abs(before) - 1, weights=np.sign(before), minlength=len(sizes)) > 0
        alive = np.flatnonzero(lives & (part_of >= 0))
        alive = alive[np.argsort(births[alive], kind="stable")]
        oldest = alive[np.unique(tensors[alive], return_index=True)[1]]
        held.append(np.bincount(part_of[oldest], weights=smallest[tensors[oldest]], minlength=len(parts)))
    return np.array(held).astype(np.int64).reshape(-1, len(parts))


def _part_of(timeline: Timeline, parts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """The part to which each storage is counted; -1: to none."""
    owners = np.array(timeline.owners, dtype=np.int64)
    part_of = np.full(len(owners), -1)
    for part, members in enumerate(parts):
        part_of[np.isin(owners, members)] = part
    part_of[[copy for copy, whole in enumerate(timeline.wholes) if whole >= 0]] = -1
    return part_of


def _instants(timeline: Timeline, part_of: NDArray[np.int64], parts: int) -> list[int]:
    """Events at which all parts together, and the largest ones by themselves, hold the most."""
    events = np.array(timeline.events, dtype=np.int64)
    if not len(events):
        return [0]
    storages = np.abs(events) - 1
    changes = np.sign(events) * np.array(timeline.sizes, dtype=np.int64)[storages]
    whose = part_of[storages]
    highest = [(int(np.iinfo(np.int64).max), int(np.cumsum(np.where(whose >= 0, changes, 0)).argmax()))]
    for part in range(parts):
        mine = np.flatnonzero(whose == part)
        if len(mine):
            held = np.cumsum(changes[mine])
            highest.append((int(held.max()), int(mine[held.argmax()])))
    ranked = [instant for _, instant in sorted(highest, key=lambda found: -found[0])]
    return list(dict.fromkeys(ranked))[:_INSTANTS]
