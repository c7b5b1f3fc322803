"""Where the items beside a chain may go."""

from __future__ import annotations

from collections.abc import Sequence

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
