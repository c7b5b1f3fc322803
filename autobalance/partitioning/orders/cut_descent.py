"""The best way to cut a chain among those that small changes lead to, many of them priced at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autobalance.partitioning.chains.step_time import PRECISION
from autobalance.partitioning.orders.rounds import Costs, Cuts, Ways

Key = tuple[float, ...]

MOST_NEIGHBOURS = 512
"""Ways of one step."""


def descend(
    starts: Sequence[Cuts], costs: Callable[[Ways], Costs], neighbours: Callable[[Cuts], Ways], steps: int
) -> tuple[Cuts, Key]:
    """From the best of several ways on take the best neighbour, again and again, until none is better.

    Example:
        >>> descend([(2, 4)], costs, lambda cuts: neighbours(cuts, 8), steps=100)

    Args:
        starts: ways to begin with.
        costs: of many ways: `[way, entry]`, the more important entries first.
        neighbours: ways that a small change leads to.
        steps: how many may be taken.

    Returns:
        The best way, and what it costs.
    """
    best: Cuts | None = None
    least: Key = (np.inf,)
    ways = np.array(starts, dtype=np.int64)
    for _ in range(1 + steps):
        keys = costs(ways)
        first = int(np.lexsort(keys.T[::-1])[0])
        price = tuple(keys[first].tolist())
        if best is not None and not _is_less(price, least):
            break
        best, least = tuple(ways[first].tolist()), price
        ways = neighbours(best)
        if not len(ways):
            break
    assert best is not None, "there is a way to start from"
    return best, least


def neighbours(cuts: Cuts, units: int, fixed: frozenset[int] = frozenset()) -> Ways:
    """Ways in which one stage has given a unit to another one, and those between them have moved by one.

    Of many stages only those that are near one another give and take.

    Example:
        >>> neighbours((1, 3), units=4).tolist()
        [[1, 2], [2, 3]]

    Args:
        cuts: of the way.
        units: of the chain.
        fixed: cuts that stay.
    """
    count = len(cuts)
    farthest = max(1, MOST_NEIGHBOURS // max(1, 2 * count))
    pairs = [(i, j) for i in range(count) for j in range(i, min(count, i + farthest))]
    first, last = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    here = np.arange(count)
    moved = (first[:, None] <= here) & (here <= last[:, None])
    moved = moved[~moved[:, sorted(fixed)].any(axis=1)]
    ways: Ways = np.concatenate([np.array(cuts, dtype=np.int64) - moved, np.array(cuts, dtype=np.int64) + moved])
    bounds = np.pad(ways, ((0, 0), (1, 1)))
    bounds[:, -1] = units
    return ways[(np.diff(bounds, axis=1) > 0).all(axis=1)]


def _is_less(key: Key, other: Key) -> bool:
    """Whether the first entries that differ by more than rounding differ downwards."""
    pairs = ((mine, theirs) for mine, theirs in zip(key, other, strict=True))
    return next((mine < theirs for mine, theirs in pairs if abs(mine - theirs) > PRECISION * abs(theirs)), False)
