"""Independent judges: a replay and an exhaustive search written the slow and obvious way, and random timelines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement

import pytest

from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import HOST, ROOT, Timeline


def _random_timeline(rng: random.Random, blocks: int, *, events: int = 60, views: bool = False) -> Timeline:
    """Births and deaths in any order; a third of the storages hold a tensor that others hold as well."""
    sizes: list[int] = []
    owners: list[int] = []
    values: list[int] = []
    order: list[int] = []
    alive: list[int] = []
    size_of_value = {value: rng.randint(1, 9) for value in range(5)}
    for _ in range(events):
        if alive and rng.random() < 0.4:
            storage = alive.pop(rng.randrange(len(alive)))
            order.append(-(storage + 1))
            continue
        value = rng.randrange(5) if rng.random() < 0.35 else -1
        shared = value >= 0 and not views
        sizes.append(size_of_value[value] if shared else rng.randint(1, 9))
        values.append(value)
        owners.append(rng.choice([*range(blocks), ROOT, HOST]) if rng.random() < 0.3 else rng.randrange(blocks))
        order.append(len(sizes))
        alive.append(len(sizes) - 1)
    return Timeline(tuple(sizes), tuple(owners), tuple(values), tuple(order))


def _naive_replay(timeline: Timeline, device_of: Sequence[int], root: int, devices: int) -> list[int]:
    """Every instant looked at afresh: which tensors does the device hold, and how large is the first holder of each?"""
    peaks = [0] * devices
    for device in range(devices):
        holders: dict[object, set[int]] = {}
        size: dict[object, int] = {}
        for event in timeline.events:
            storage = abs(event) - 1
            owner = timeline.owners[storage]
            if owner == HOST or (root if owner == ROOT else device_of[owner]) != device:
                continue
            value = timeline.values[storage]
            tensor: object = ("shared", value) if value >= 0 else ("own", storage)
            if event > 0:
                if not holders.setdefault(tensor, set()):
                    size[tensor] = timeline.sizes[storage]
                holders[tensor].add(storage)
            else:
                holders[tensor].remove(storage)
            peaks[device] = max(peaks[device], sum(size[tensor] for tensor, held in holders.items() if held))
    return peaks


def _contiguous(blocks: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to give consecutive blocks to devices in order, empty ones allowed."""
    yield from combinations_with_replacement(range(devices), blocks)


@pytest.fixture
def random_timeline() -> Callable[..., Timeline]:
    return _random_timeline


@pytest.fixture
def naive_replay() -> Callable[[Timeline, Sequence[int], int, int], list[int]]:
    return _naive_replay


@pytest.fixture
def contiguous() -> Callable[[int, int], Iterator[tuple[int, ...]]]:
    return _contiguous


@pytest.fixture
def random_profile() -> Callable[..., Profile]:
    def make(rng: random.Random, blocks: int, together: Sequence[Sequence[int]] = ()) -> Profile:
        names = tuple(BlockCost(f"b{index}", weights=1) for index in range(blocks))
        timeline = _random_timeline(rng, blocks)
        return Profile(names, timeline, together=tuple(tuple(group) for group in together))

    return make
