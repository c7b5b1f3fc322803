"""The storages of several micro-batches: those of one, then a row of copies for each further one."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from autobalance.profiling.timeline import HOST, ROOT, Timeline, Whole
from autobalance.timelines.launched import Launched
from autobalance.timelines.script import Script


class Copies:
    """Numbers copies of storages, and describes them.

    Args:
        timeline: of one micro-batch.
        script: says which storages are copied.
        count: micro-batches.
        leader_of: by owner less `HOST`, the micro-batch whose backward makes the gradients that stay.
    """

    def __init__(self, timeline: Timeline, script: Script, count: int, leader_of: Whole) -> None:
        self._timeline = timeline
        self._script = script
        self._count = count
        self._leader_of = leader_of
        self._total = len(timeline.sizes)
        self._copied = np.flatnonzero(script.copied)
        self._rank: Whole = np.zeros(self._total, dtype=np.int64)
        self._rank[self._copied] = np.arange(len(self._copied))

    def number(self, storages: Whole, copies: Whole) -> Whole:
        """Numbers of copies of storages; copy 0 is the storage itself.

        Args:
            storages: numbers of storages.
            copies: which copy of each.
        """
        further = self._total + (copies - 1) * len(self._copied) + self._rank[storages]
        return np.where(copies == 0, storages, further)

    def columns(self) -> dict[str, Any]:
        """All columns of a timeline that describe storages."""
        old, sources = self._timeline, self._sources
        columns: dict[str, Any] = {
            name: tuple(np.array(getattr(old, name), dtype=np.int64)[sources].tolist())
            for name in ("sizes", "owners", "fixed", "per_sample")
            if getattr(old, name)
        }
        scratch = np.zeros(self._total, dtype=np.bool_)
        scratch[list(old.scratch)] = True
        columns["scratch"] = tuple(np.flatnonzero(scratch[sources]).tolist())
        columns["values"] = tuple(self._values().tolist())
        if old.wholes:
            columns["wholes"] = tuple(self._wholes().tolist())
        return columns

    @cached_property
    def _sources(self) -> Whole:
        return np.concatenate([np.arange(self._total), np.tile(self._copied, self._count - 1)])

    @cached_property
    def _numbers(self) -> Whole:
        """Which copy each storage is."""
        further = np.repeat(np.arange(1, self._count), len(self._copied))
        return np.concatenate([np.zeros(self._total, dtype=np.int64), further])

    def _values(self) -> Whole:
        """Copies of one micro-batch hold one tensor where those of the timeline do; what all share is shared by all."""
        values, script = np.array(self._timeline.values, dtype=np.int64), self._script
        most = int(values.max(initial=-1)) + 1
        shared = np.zeros(most + 1, dtype=np.bool_)
        shared[values[~script.copied]] = True  # the last entry stands for no value
        held = values[self._sources]
        of = self._numbers
        leaders = self._leader_of[self._timeline.owner_column - HOST][self._sources]
        of = np.where(script.gradients[self._sources], taken_in_turn(of, leaders), of)
        return np.where((held < 0) | shared[held], held, held + of * most)

    def _wholes(self) -> Whole:
        wholes = np.array(self._timeline.wholes, dtype=np.int64)[self._sources]
        copied = (wholes >= 0) & self._script.copied[wholes]
        return np.where(copied, self.number(wholes, self._numbers), wholes)


def taken_in_turn(copies: Whole, leaders: Whole) -> Whole:
    """Copies of gradients, of which copy 0 is the leader's; the same the other way round.

    Example:
        >>> taken_in_turn(np.array([0, 1, 2]), np.array([2, 2, 2]))
        array([2, 1, 0])

    Args:
        copies: numbers of micro-batches.
        leaders: for each the micro-batch that is the first in the backward.
    """
    return np.where(copies == leaders, 0, np.where(copies == 0, leaders, copies))


def leaders_of(launched: Launched, stages: Whole) -> Whole:
    """By owner less `HOST`, the micro-batch that is the first in the backward of the owner's stage.

    Example:
        >>> leaders_of(launched, stages=np.array([2, 2]))

    Args:
        launched: launches.
        stages: blocks of every stage.
    """
    backward = launched.leaders[: launched.stages - 1 : -1]
    beside = np.repeat(backward[-1:], ROOT - HOST + 1)  # the loss is in the last stage
    return np.concatenate([beside, np.repeat(backward, stages)])
