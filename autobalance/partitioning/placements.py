"""Where the items beside a chain may go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_COMBINATIONS = 4096
"""Placements of the items that are tried one by one."""

Placement = tuple[int, ...]
"""Device of each item."""


def all_placements(given: Sequence[int | None], alike: Sequence[Sequence[int]], most: int) -> list[Placement]:
    """All placements of items; of those that differ only in devices of one kind, the first.

    Example:
        >>> all_placements([None, None], alike=[(0, 1, 2)], most=9)
        [(0, 0), (0, 1)]

    Args:
        given: device of each item; None: any.
        alike: devices by kind.
        most: with more than that the search for them ends.
    """
    kind_of = {device: at for at, devices in enumerate(alike) for device in devices}
    special = {device for device in given if device is not None}
    found: list[Placement] = [()]
    for wanted in given:
        longer: list[Placement] = []
        for placement in found:
            if wanted is not None:
                longer.append((*placement, wanted))
                continue
            taken = {*placement, *special}
            fresh = {kind_of[device]: device for device in sorted(kind_of, reverse=True) if device not in taken}
            longer += [(*placement, device) for device in sorted({*taken, *fresh.values()})]
        found = longer
        if len(found) > most:
            break
    return found


def improved(given: Sequence[int | None], devices: int, cost: Callable[[Placement], tuple[float, ...]]) -> Placement:
    """A placement that no single item can better by moving: items take turns.

    Example:
        >>> improved([None, 1], devices=2, cost=lambda placement: (placement[0],))
        (0, 1)

    Args:
        given: device of each item; None: any.
        devices: how many there are.
        cost: what a placement leads to; smaller is better.
    """
    movable = [index for index, device in enumerate(given) if device is None]
    order = {index: at % devices for at, index in enumerate(movable)}
    chosen = tuple(order[index] if device is None else device for index, device in enumerate(given))
    least, moved = cost(chosen), True
    while moved:
        moved = False
        for index in movable:
            for device in range(devices):
                trial = (*chosen[:index], device, *chosen[index + 1 :])
                if (price := cost(trial)) < least:
                    chosen, least, moved = trial, price, True
    return chosen
