"""What each micro-batch does at each event of a timeline: a script that every launch plays its part of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.timeline import Timeline, Whole
from autobalance.timelines.launched import Manner
from autobalance.timelines.passes import Pass, passes_of
from autobalance.timelines.roles import Role, additions, roles_of, through_casts


class When(IntEnum):
    """Which of the launches that play a part do a line of it."""

    ALWAYS = 0
    FIRST = 1
    LATER = 2
    LAST = 3


class Whose(IntEnum):
    """Which copy of the storage a line is about."""

    FIXED = 0
    OWN = 1
    PREVIOUS = 2
    GRADIENT = 3
    """The one that stays, for the first backward; a copy for all others."""


_GRID = 4
"""Keys per event of the timeline, so that lines can be put between events."""


@dataclass(frozen=True)
class Script:
    """Lines in the order of time.

    Attributes:
        passes: forwards and backwards of the timeline.
        keys: place of each line; `key_of` says where an event's begin.
        storages: of the timeline.
        born: whether the storage is born; else it dies.
        when, whose: as the enumerations say.
        copies: which copy, for `Whose.FIXED`.
        copied: whether a storage of the timeline exists once for each micro-batch.
        gradients: whether it is a gradient.
    """

    passes: tuple[Pass, ...]
    keys: Whole
    storages: Whole
    born: NDArray[np.bool_]
    when: Whole
    whose: Whole
    copies: Whole
    copied: NDArray[np.bool_]
    gradients: NDArray[np.bool_]

    def line_of(self, positions: Whole) -> Whole:
        """The first line of an event, or of what is put before it."""
        return np.searchsorted(self.keys, _GRID * positions - 2)

    def own_line_of(self, positions: Whole) -> Whole:
        """The line of the event itself."""
        return np.searchsorted(self.keys, _GRID * positions)


def script_of(timeline: Timeline, training: bool, manner: Manner, count: int) -> Script:
    """The script of a timeline's steps for several micro-batches.

    Example:
        >>> script_of(timeline, True, Manner.ONE_GRAPH, count=4)

    Args:
        timeline: of one micro-batch.
        training: whether a forward has a backward.
        manner: how micro-batches share a step.
        count: how many there are.

    Raises:
        ValueError: marks do not say where forwards and backwards are.
    """
    in_turn = manner is Manner.IN_TURN
    passes = passes_of(timeline, training)
    roles, others = roles_of(timeline, passes)
    if in_turn:
        roles = np.where(roles == Role.CAST, Role.OWN, roles)
    storages, born = timeline.event_columns
    when, whose, copies = _as_traced(roles, born, passes, in_turn, count)
    added = _additions(timeline, passes, roles, in_turn)
    if in_turn:
        added += _exchanges(storages, born, passes, roles, others)
    else:
        found = through_casts(timeline, roles)
        added[0] = _without(added[0], storages[found])
        added += _late_gradients(timeline, passes, found, manner, when, whose)
    # A line of all copies is one line for each of them.
    repeats = np.where(copies == count, count, 1)
    lines = np.repeat(np.arange(len(storages)), repeats)
    place = np.arange(len(lines)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    columns = [
        _GRID * lines, storages[lines], born[lines], when[lines], whose[lines],
        np.where(repeats[lines] > 1, place, copies[lines]),
    ]  # fmt: skip
    joined = [np.concatenate(column) for column in zip(columns, *added, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    copied, gradients = np.zeros((2, len(timeline.sizes)), dtype=np.bool_)
    copied[storages[(roles != Role.ONCE) & (roles != Role.CAST)]] = True
    gradients[storages[roles == Role.GRADIENT]] = True
    keys, of, is_birth, at, who, which = (column[order] for column in joined)
    return Script(passes, keys, of, is_birth, at, who, which, copied, gradients)


def _as_traced(
    roles: Whole, born: NDArray[np.bool_], passes: tuple[Pass, ...], in_turn: bool, count: int
) -> tuple[Whole, Whole, Whole]:
    """For each event of the timeline when it happens and whose storage it is about; `count` stands for all copies."""
    inside = np.zeros(len(roles), dtype=np.bool_)
    for each in passes:
        inside[each.start : each.stop] = True
    own, gradient, result, batch, cast = (
        roles == role for role in (Role.OWN, Role.GRADIENT, Role.RESULT, Role.BATCH, Role.CAST)
    )
    all_or_last = count - 1 if in_turn else count
    when: Whole = np.full(len(roles), When.ALWAYS, dtype=np.int64)
    when[inside & ((roles == Role.ONCE) | (~born & (gradient | result)) | (born & cast))] = When.FIRST
    when[~born & cast] = When.LAST
    if not in_turn:
        when[inside & ~born & (batch | result | gradient)] = When.LAST
    whose: Whole = np.full(len(roles), Whose.FIXED, dtype=np.int64)
    whose[own | (born & result)] = Whose.OWN
    whose[born & gradient] = Whose.GRADIENT
    copies: Whole = np.zeros(len(roles), dtype=np.int64)
    copies[~born & (result | batch)] = all_or_last
    if in_turn:
        whose[inside & ~born & batch] = Whose.OWN
    else:
        copies[born & batch] = count
    copies[whose != Whose.FIXED] = 0
    return when, whose, copies


def _additions(timeline: Timeline, passes: tuple[Pass, ...], roles: Whole, in_turn: bool) -> list[list[Whole]]:
    """What is dropped once it is added to, or has replaced, what the micro-batches before it made."""
    storages, born = timeline.event_columns
    ends = additions(timeline, passes)
    added = []
    for role, whose in ((Role.GRADIENT, Whose.GRADIENT), (Role.RESULT, Whose.PREVIOUS)):
        if role == Role.GRADIENT or in_turn:
            births = np.flatnonzero(born & (roles == role))
            added.append(_lines(_GRID * ends[births] + 1, storages[births], False, whose))
    return added


def _late_gradients(
    timeline: Timeline, passes: tuple[Pass, ...], found: Whole, manner: Manner, when: Whole, whose: Whole
) -> list[list[Whole]]:
    """Gradients of weights whose casts all micro-batches use: when they are made of the casts' gradients.

    Autograd takes first what was made last in the forward (torch/csrc/autograd/engine.cpp, CompareNodeTaskTime), and
    the casts were made by the first micro-batch. A later one's backward has all gradients of casts before it makes
    gradients of weights of any; one backward of all adds up those of casts until it is at the first micro-batch.
    Changes `when` and `whose` of the events as traced, and gives the lines that come on top.
    """
    storages, _ = timeline.event_columns
    births = timeline.lives[0]
    weights, casts = storages[found], storages[found + 1]
    if manner is Manner.OVERLAPPING:
        when[found] = when[found + 1] = When.FIRST
        stops = np.array([each.stop for each in passes])
        ends = stops[np.searchsorted(stops, found, side="right")] - 1
        own, three = [Whose.GRADIENT, Whose.OWN, Whose.GRADIENT], np.column_stack([weights, casts, weights])
        lines = _lines(np.repeat(_GRID * ends + 1, len(own)), three.ravel(), False, Whose.OWN)
        lines[2][::3] = True
        lines[4] = np.tile(np.array(own), len(found))
        return [lines]
    when[found] = when[found + 1] = When.LAST
    whose[births[casts]] = Whose.GRADIENT
    whose[found] = whose[found + 1] = Whose.FIXED
    return [_lines(_GRID * found - 1, casts, False, Whose.GRADIENT)]


def _without(lines: list[Whole], storages: Whole) -> list[Whole]:
    """Lines but those about some storages."""
    others = ~np.isin(lines[1], storages)
    return [column[others] for column in lines]


def _exchanges(
    storages: Whole, born: NDArray[np.bool_], passes: tuple[Pass, ...], roles: Whole, others: Whole
) -> list[list[Whole]]:
    """The next batch arrives before a forward, and takes the place of the one before it."""
    added = []
    before = 0
    for each in passes:
        births = before + np.flatnonzero((born & (roles == Role.BATCH))[before : each.start])
        stay = births[others[births] >= each.stop]
        key = _GRID * each.start
        added.append(_lines(np.full(len(births), key - 2), storages[births], True, Whose.OWN))
        added.append(_lines(np.full(len(stay), key - 1), storages[stay], False, Whose.PREVIOUS))
        before = each.stop
    return added


def _lines(keys: Whole, storages: Whole, born: bool, whose: Whose) -> list[Whole]:
    """Lines for all micro-batches but the first."""
    count = len(keys)
    return [
        keys, storages, np.full(count, born), np.full(count, When.LATER), np.full(count, whose),
        np.zeros(count, dtype=np.int64),
    ]  # fmt: skip
