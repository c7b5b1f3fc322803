"""Devices of one kind: alike in budget, speed, links, and in what lies on them beside the chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autobalance.devices.device import Device
from autobalance.devices.kinds import kinds_of
from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.sweep import count_states


@dataclass(frozen=True)
class Kind:
    """Devices that may change places.

    Attributes:
        devices: their indices.
        budget: bytes that each may hold.
        excess: bytes by which each, where it holds something, is known to stand above the replay.
        items: indices of the chain's items that are on it.
        units: units of the chain that must be on it.
    """

    devices: tuple[int, ...]
    budget: int
    excess: int = 0
    items: frozenset[int] = frozenset()
    units: tuple[int, ...] = ()


def kinds_for(
    devices: Sequence[Device],
    budgets: Sequence[int],
    excess: Sequence[int],
    chain: Chain,
    item_devices: Sequence[int],
) -> tuple[Kind, ...]:
    """The kinds of devices for a placement of the chain's items; those with items or bound units stand by themselves.

    Example:
        >>> kinds_for(devices, budgets, (0, 0), chain, item_devices=())

    Args:
        devices: of the question.
        budgets: bytes per device.
        excess: bytes per device.
        chain: what is cut.
        item_devices: device of each of its items.
    """
    found: list[list[int]] = []
    for alike in kinds_of(devices, budgets):
        groups: dict[tuple[int, int | None], list[int]] = {}
        for device in alike:
            special = device in item_devices or device in chain.bound.values()
            groups.setdefault((excess[device], device if special else None), []).append(device)
        found += groups.values()
    return tuple(
        Kind(
            tuple(group),
            budgets[group[0]],
            excess[group[0]],
            frozenset(item for item, device in enumerate(item_devices) if device == group[0]),
            tuple(unit for unit, device in chain.bound.items() if device == group[0]),
        )
        for group in sorted(found)
    )


def merged(kinds: Sequence[Kind], most: int) -> tuple[Kind, ...]:
    """Kinds so few that all orders of their devices can be told apart: the nearest budgets become the lower of them.

    Example:
        >>> merged(kinds, most=20_000)

    Args:
        kinds: of devices.
        most: states of the search that are not too many.
    """
    found = list(kinds)
    while count_states([len(kind.devices) for kind in found]) > most:
        plain = sorted((kind for kind in found if not kind.items and not kind.units), key=lambda kind: kind.budget)
        if len(plain) < 2:
            break
        gaps = [above.budget - below.budget for below, above in pairwise(plain)]
        below, above = plain[gaps.index(min(gaps)) :][:2]
        devices = tuple(sorted(below.devices + above.devices))
        joined = replace(below, devices=devices, excess=max(below.excess, above.excess))
        found = sorted([kind for kind in found if kind not in (below, above)] + [joined], key=lambda kind: kind.devices)
    return tuple(found)
