"""Chains of one model that know nothing of each other: policy and reference, teacher and student."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autobalance.partitioning.transfers import Crossing
from autobalance.profiling.timeline import ROOT, Timeline

Part = tuple[int, int]
"""First unit of a chain, and one past its last one."""


def independent_parts(
    timeline: Timeline, crossings: Sequence[Crossing], units: Sequence[Sequence[int]]
) -> tuple[Part, ...]:
    """The consecutive runs of units between which nothing passes but what comes from the root, or goes there.

    Example:
        >>> independent_parts(profile.timeline, crossings_of(profile), chain.units)
        ((0, 12), (12, 24))

    Args:
        timeline: that the crossings were found in. One by hand is one chain: its blocks pass something on by
            definition, of 0 bytes where nothing else is said.
        crossings: what passes between blocks and the root.
        units: owners of each unit, in call order.

    Returns:
        All units in order; a single part where everything hangs together.
    """
    count = len(units)
    if max(timeline.values, default=-1) < 0:
        return ((0, count),)
    place = {owner: unit for unit, owners in enumerate(units) for owner in owners if owner != ROOT}
    passes = np.zeros(count + 1, dtype=np.int64)
    for crossing in crossings:
        if crossing.source == ROOT:
            continue
        ends = [place[owner] for owner in (crossing.source, *crossing.targets) if owner in place]
        if ends:
            # Cuts behind the first of them and up to the last one part them.
            passes[min(ends) + 1] += 1
            passes[max(ends) + 1] -= 1
    free = np.flatnonzero(passes.cumsum()[1:count] == 0) + 1
    return tuple(pairwise([0, *free.tolist(), count]))
