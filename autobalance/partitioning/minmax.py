"""Exact min-max partition of a chain by dynamic programming.

`uses[d][i, j]` is the relative use of device `d` when it holds the units `[i, j)`: infinite where that is not allowed,
and wherever `j < i`. A partition is a tuple of cuts: device `d` holds `[cuts[d], cuts[d + 1])`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Uses = NDArray[np.float64]
Cuts = tuple[int, ...]
Key = tuple[float, ...]


def least_largest(uses: Sequence[Uses]) -> list[Uses]:
    """The least possible largest use of the devices from each one on, for every unit to start from.

    Example:
        >>> least_largest(uses)[0][0]  # the whole chain on all devices

    Args:
        uses: one matrix for each device.

    Returns:
        One vector for each device; entry `k`: the chain from unit `k` on, cut over that device and the later ones.
        Infinite where there is no way.
    """
    best = uses[-1][:, -1]
    suffixes = [best]
    for use in reversed(uses[:-1]):
        best = np.maximum(use, best).min(axis=1)
        suffixes.append(best)
    return suffixes[::-1]


def fairest(
    uses: Sequence[Uses], held: Sequence[bool], start: int = 0, most: float = np.inf
) -> tuple[Key, Cuts] | None:
    """The partition of the units from `start` on whose uses are least, compared from the largest on.

    Of those with the least largest use, those with the fewest empty devices come first; of these, the one with the
    least second-largest use, and so on.

    Sorted uses, compared from the largest on, keep their order when the same use is added to both sides, so the best
    partition of a chain contains the best partition of its rest: the dynamic programme may carry whole sorted vectors.

    Example:
        >>> key, cuts = fairest(uses, held=[False] * len(uses))

    Args:
        uses: one matrix for each device.
        held: whether the device holds something beside the chain, so that it is not empty without any unit of it.
        start: first unit.
        most: largest use that is still of interest.

    Returns:
        What was minimised, as (largest use, empty devices, uses from the largest on), and the cuts; None where there is
        no way, or none of interest.
    """
    suffixes = least_largest(uses)
    limit = float(suffixes[0][start])
    if not np.isfinite(limit) or limit > most:
        return None
    units, devices = uses[0].shape[0] - 1, len(uses)
    reached = [np.zeros(units + 1, dtype=bool) for _ in range(devices)]
    reached[0][start] = True
    for device in range(devices - 1):
        reached[device + 1] = (uses[device][reached[device]] <= limit).any(axis=0) & (suffixes[device + 1] <= limit)

    # Per device and unit to start from: empty devices, then the uses from the largest on, of the best way on.
    ways = np.full((units + 1, 1), np.inf)
    ways[units] = 0.0
    choices: list[NDArray[np.int64]] = []
    for device in reversed(range(devices)):
        now = np.full((units + 1, ways.shape[1] + 1), np.inf)
        choice = np.full(units + 1, -1, dtype=np.int64)
        for unit in np.flatnonzero(reached[device]).tolist():
            stops = np.flatnonzero((uses[device][unit] <= limit) & np.isfinite(ways[:, 0]))
            candidates = np.empty((len(stops), now.shape[1]))
            candidates[:, 0] = ways[stops, 0]
            if not held[device]:
                candidates[:, 0] += stops == unit
            candidates[:, 1:-1] = ways[stops, 1:]
            candidates[:, -1] = uses[device][unit, stops]
            candidates[:, 1:] = -np.sort(-candidates[:, 1:], axis=1)
            best = _least_row(candidates)
            now[unit], choice[unit] = candidates[best], stops[best]
        ways = now
        choices.append(choice)
    cuts = [start]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return (limit, *ways[start].tolist()), tuple(cuts)


def _least_row(rows: Uses) -> int:
    """Index of the lexicographically least row; of equal ones the last, which fills earlier devices first."""
    left = np.arange(len(rows))
    for column in rows.T:
        if len(left) == 1:
            break
        values = column[left]
        left = left[values == values.min()]
    return int(left[-1])
