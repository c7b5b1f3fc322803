"""Which devices are interchangeable: a plan stays as good when two of them change places."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.devices.device import Device
from autobalance.devices.links import link_between


def kinds_of(devices: Sequence[Device], budgets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that are alike: the same budget, speed, node, and the same link to every other device.

    Example:
        >>> kinds_of(parse_devices("2x40GiB,16GiB"), [40, 40, 16])
        ((0, 1), (2,))

    Args:
        devices: the devices of the question.
        budgets: bytes that each may hold.

    Returns:
        Groups of indices, each in ascending order, by their first members.
    """
    by_figures: dict[object, list[int]] = {}
    for index, (device, budget) in enumerate(zip(devices, budgets, strict=True)):
        by_figures.setdefault((budget, device.speed), []).append(index)
    if not any(device.links for device in devices):
        return tuple(map(tuple, by_figures.values()))
    groups: list[list[int]] = []
    for same in by_figures.values():
        fresh: list[list[int]] = []
        for index in same:
            home = next((group for group in fresh if _send_alike(devices, group[0], index)), None)
            if home is None:
                fresh.append([index])
            else:
                home.append(index)
        groups += fresh
    return tuple(map(tuple, sorted(groups)))


def _send_alike(devices: Sequence[Device], i: int, j: int) -> bool:
    return all(
        link_between(devices[i], third) == link_between(devices[j], third)
        for index, third in enumerate(devices)
        if index not in (i, j)
    )
