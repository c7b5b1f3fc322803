"""Storages of a traced step that are in host memory where an optimizer's state, or the weights of blocks, are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.timeline import HOST, Timeline

Flags = NDArray[np.bool_]


def tells_optimizer(timeline: Timeline) -> bool:
    """Whether the optimizer's storages can be told from others: the trace went through its step.

    Example:
        >>> tells_optimizer(profile.timeline)

    Args:
        timeline: of a trace.
    """
    return any(name.endswith(" optimizer") for name, _ in timeline.marks)


def with_host(timeline: Timeline, *, optimizer: Collection[int] = (), weights: Collection[int] = ()) -> Timeline:
    """The same events, where some storages are on no device but in host memory.

    Example:
        >>> less = with_host(profile.timeline, optimizer=[0, 1, 2])

    Args:
        timeline: of steps with one micro-batch, with every block apart.
        optimizer: blocks whose optimizer runs on the host: all that is born in its step is there.
        weights: blocks whose weights and buffers, and the gradients of these, are there as well.
    """
    births, deaths = timeline.lives
    owners = timeline.owner_column
    scratch = np.zeros(len(owners), dtype=np.bool_)
    scratch[list(timeline.scratch)] = True
    of_steps = _born_in(timeline, births, "optimizer")
    first = min((position for name, position in timeline.marks if name.endswith(" forward")), default=0)
    stays = births < first
    # What a backward makes and leaves are gradients.
    for start, stop in _windows(timeline, "backward"):
        stays |= (births >= start) & (births < stop) & (deaths >= stop)
    on_host = np.isin(owners, list(optimizer)) & of_steps
    on_host |= np.isin(owners, list(weights)) & (of_steps | stays)
    moved = np.where(on_host & ~scratch, HOST, owners)
    return replace(timeline, owners=tuple(moved.tolist()))


def _born_in(timeline: Timeline, births: NDArray[np.int64], phase: str) -> Flags:
    inside: Flags = np.zeros(len(births), dtype=np.bool_)
    for start, stop in _windows(timeline, phase):
        inside |= (births >= start) & (births < stop)
    return inside


def _windows(timeline: Timeline, phase: str) -> list[tuple[int, int]]:
    """First event, and one past the last, of every phase of that name."""
    ends = [*(position for _, position in timeline.marks[1:]), len(timeline.events)]
    return [
        (start, stop) for (name, start), stop in zip(timeline.marks, ends, strict=True) if name.endswith(f" {phase}")
    ]
