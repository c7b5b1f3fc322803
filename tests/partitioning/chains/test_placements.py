from __future__ import annotations

import random
from itertools import product

import pytest

from autobalance.partitioning.chains.placements import all_placements


def _alike(placement: tuple[int, ...], given: list[int | None], kind_of: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """What does not change when devices of one kind change places that nobody asked for."""
    asked = {device for device in given if device is not None}
    numbers: dict[int, tuple[int, int]] = {}
    for device in placement:
        if device in asked:
            numbers.setdefault(device, (-1, device))
        numbers.setdefault(device, (kind_of[device], sum(kind == kind_of[device] for kind, _ in numbers.values())))
    return tuple(numbers[device] for device in placement)


@pytest.mark.parametrize("seed", range(30))
def test_every_placement_is_there_once_but_for_devices_that_may_change_places(seed: int) -> None:
    draw = random.Random(seed)
    devices = list(range(draw.randint(1, 5)))
    kind_of = {device: draw.randint(0, 1) for device in devices}
    alike = [[device for device in devices if kind_of[device] == kind] for kind in (0, 1)]
    given = [draw.choice([None, None, draw.choice(devices)]) for _ in range(draw.randint(0, 4))]
    found = all_placements(given, alike, most=10**6)
    wanted = {
        _alike(placement, given, kind_of)
        for placement in product(devices, repeat=len(given))
        if all(place in (None, device) for place, device in zip(given, placement, strict=True))
    }
    assert {_alike(placement, given, kind_of) for placement in found} == wanted
    assert len(found) == len(wanted)


def test_placements_that_are_too_many_are_not_gone_through() -> None:
    found = all_placements([None] * 40, [[device] for device in range(4)], most=100)
    assert 100 < len(found) <= 400
