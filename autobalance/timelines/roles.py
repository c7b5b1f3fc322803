"""What becomes of each storage when a step takes several micro-batches: made once, by each, or added to the first."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.timeline import ROOT, Timeline, Whole
from autobalance.timelines.passes import Pass


class Role(IntEnum):
    """What a storage is between one birth and the death that follows."""

    ONCE = 0
    """There once: weights, buffers, optimizer state, workspaces, what a forward makes and keeps for good."""
    OWN = 1
    """Made by each micro-batch, and gone when it is back: what is saved, what is transient, copies on their way."""
    GRADIENT = 2
    """Made by a backward and kept. Later micro-batches make theirs, add it to the first in place, and drop it."""
    RESULT = 3
    """Made by a forward and there until the next step's: the loss, what a metric or an attribute remembers."""
    CAST = 4
    """A weight's cast, which autocast keeps until its context ends: each micro-batch's own where one follows the other,
    else made by the first forward and used by all."""
    BATCH = 5
    """On the root device before the forward, and gone when the next batch is there."""


def roles_of(timeline: Timeline, passes: Sequence[Pass]) -> tuple[Whole, Whole]:
    """The role of the storage at each event, and the event at which it was born or is to die.

    Example:
        >>> roles, others = roles_of(timeline, passes_of(timeline, training=True))

    Args:
        timeline: storage events.
        passes: its forwards and backwards, in order of time.

    Returns:
        Roles by event; for each birth its death (the number of events for never), for each death its birth.
    """
    storages, born = timeline.event_columns
    count = len(storages)
    others = _others(storages, count)
    roles: Whole = np.zeros(count, dtype=np.int64)
    owners, scratch = timeline.owner_column[storages], _among(timeline.scratch, timeline)[storages]
    casts = _among(timeline.casts, timeline)[storages]
    positions = np.arange(count)
    before = 0
    for number, each in enumerate(passes):
        following = passes[number + 1].back if number + 1 < len(passes) else count - (number == 0)
        ours = born & (positions >= each.start) & (positions < each.stop)
        stays = ours & (others >= each.stop)
        in_forward = positions < each.back
        roles[ours & ~stays] = Role.OWN
        roles[ours & ~stays & casts] = Role.CAST
        roles[stays & ~in_forward & ~scratch] = Role.GRADIENT
        # What is kept for good is made in the first step; what is new in the last one would be replaced by another.
        roles[stays & in_forward & ~scratch & (others <= following)] = Role.RESULT
        arrives = born & (positions >= before) & (positions < each.start) & (owners == ROOT)
        roles[arrives & (others >= each.start) & (others < count)] = Role.BATCH
        before = each.stop
    roles[~born] = roles[others[~born]]
    return roles, others


def additions(timeline: Timeline, passes: Sequence[Pass]) -> Whole:
    """For each event of a pass, the last event before an operation that comes after it.

    Autograd adds a gradient to the one that is there, and lets go of it, once the operation that made it has let go of
    what it used; it makes all its results before that.

    Example:
        >>> ends = additions(timeline, passes_of(timeline, training=True))

    Args:
        timeline: storage events.
        passes: of its steps.
    """
    storages, born = timeline.event_columns
    count = len(storages)
    births = timeline.lives[0]
    ends: Whole = np.arange(count)
    scratch = _among(timeline.scratch, timeline)[storages]
    for start, stop in (
        (start, stop) for each in passes for start, stop in pairwise((each.start, each.back, each.stop))
    ):
        if start < stop:
            next_is_born = np.r_[born[start + 1 : stop], True]
            is_end = ~born[start:stop] & ~scratch[start:stop] & next_is_born
            is_end[-1] = True
            found = np.flatnonzero(is_end)
            ends[start:stop] = start + found[np.searchsorted(found, np.arange(stop - start))]
    for gradient, following in timeline.gradients:
        birth = births[gradient]
        each = next((each for each in passes if each.back <= birth < each.stop), None)
        if each is not None:
            at = births[following] if following >= 0 else each.stop
            ends[birth] = (at if birth < at < each.stop else each.stop) - 1
    return ends


def through_casts(timeline: Timeline, roles: Whole) -> Whole:
    """Births of gradients that are made of the gradient of a weight's cast, which dies thereby.

    Example:
        >>> births = through_casts(timeline, roles)

    Args:
        timeline: storage events.
        roles: as `roles_of` gives them.
    """
    storages, born = timeline.event_columns
    if not timeline.casts:
        return np.zeros(0, dtype=np.int64)
    nbytes = np.array(timeline.fixed or timeline.sizes, dtype=np.int64)[storages]
    halves = np.zeros(len(storages), dtype=np.bool_)
    dies = ~born[1:] & (roles[1:] == Role.OWN)
    halves[:-1] = born[:-1] & (roles[:-1] == Role.GRADIENT) & dies & (2 * nbytes[1:] == nbytes[:-1])
    return np.flatnonzero(halves)


def _others(storages: Whole, count: int) -> Whole:
    """Births and deaths of a storage take turns: the partner of each event."""
    others: Whole = np.full(count, count, dtype=np.int64)
    order = np.argsort(storages, kind="stable")
    sorted_storages = storages[order]
    heads = np.flatnonzero(np.r_[True, sorted_storages[1:] != sorted_storages[:-1]]) if count else order
    place = np.arange(count) - np.repeat(heads, np.diff(np.r_[heads, count]))
    deaths = np.flatnonzero(place % 2 == 1)
    others[order[deaths]] = order[deaths - 1]
    others[order[deaths - 1]] = order[deaths]
    return others


def _among(named: Sequence[int], timeline: Timeline) -> NDArray[np.bool_]:
    """Whether each storage is among some."""
    found = np.zeros(len(timeline.sizes), dtype=np.bool_)
    found[list(named)] = True
    return found
