"""Small changes that make a placement better, tried one by one until none does.

Stages need no such search: for every placement of what stands beside a chain, its cuts are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations

Places = tuple[int, ...]
"""Device of every item."""
Cost = tuple[float, ...]
"""Compared entry by entry."""

MOST_TRIES = 2000
"""Changes that are judged at most."""


def improve(
    start: Places,
    cost: Callable[[Places], Cost],
    neighbours: Callable[[Places], Iterable[Places]],
    *,
    tries: int = MOST_TRIES,
) -> tuple[Places, Cost]:
    """Take the first neighbour that costs less, again and again, until none does.

    Example:
        >>> improve((0, 0, 0, 1), cost, lambda places: placement_moves(places, movable=[0, 2], devices=4))

    Args:
        start: devices to begin with.
        cost: what places cost, compared entry by entry: the less, the better.
        neighbours: the places that a small change leads to; the order in which they are tried.
        tries: how many may be judged.

    Returns:
        The best places that were seen, and their cost. Equal arguments give equal results.
    """
    best, least = start, cost(start)
    seen = {start}
    found = True
    while found:
        found = False
        for places in neighbours(best):
            if places in seen:
                continue
            if len(seen) > tries:
                return best, least
            seen.add(places)
            price = cost(places)
            if price < least:
                best, least, found = places, price, True
                break
    return best, least


def placement_moves(placement: Places, movable: Sequence[int], devices: int) -> Iterator[Places]:
    """Placements in which one item is on another device, or two items have changed places.

    Example:
        >>> list(placement_moves((0, 1), movable=[0, 1], devices=2))
        [(1, 1), (0, 0), (1, 0)]

    Args:
        placement: device of every item.
        movable: items that may move.
        devices: how many there are.
    """
    for item in movable:
        for device in range(devices):
            if device != placement[item]:
                yield (*placement[:item], device, *placement[item + 1 :])
    for one, other in combinations(movable, 2):
        if placement[one] != placement[other]:
            changed = list(placement)
            changed[one], changed[other] = placement[other], placement[one]
            yield tuple(changed)
