"""Small changes of a plan that make it better, tried one by one until none does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

Places = tuple[int, ...]
"""Device of every block, or of every item."""
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
        >>> improve((0, 0, 0, 1), cost, lambda places: boundary_moves(places))

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


def boundary_moves(
    assignment: Places, groups: Sequence[Sequence[int]] = (), pinned: Sequence[int] = ()
) -> Iterator[Places]:
    """Assignments in which a block at the edge of a stage is on the other side, or two of them have changed places.

    Example:
        >>> list(boundary_moves((0, 0, 1)))
        [(0, 1, 1), (0, 0, 0), (0, 1, 0)]

    Args:
        assignment: device of every block, in call order.
        groups: blocks that share a device; they move together.
        pinned: blocks that stay.
    """
    together = {block: tuple(group) for group in groups for block in group}
    stay = {other for block in pinned for other in together.get(block, (block,))}

    def moved(targets: Mapping[int, int]) -> Places | None:
        places = list(assignment)
        for block, device in targets.items():
            for other in together.get(block, (block,)):
                if other in stay:
                    return None
                places[other] = device
        return tuple(places)

    for block in range(1, len(assignment)):
        before, after = assignment[block - 1], assignment[block]
        if before == after or together.get(block, (block,)) == together.get(block - 1):
            continue
        for targets in ({block - 1: after}, {block: before}, {block - 1: after, block: before}):
            if (places := moved(targets)) is not None:
                yield places


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
