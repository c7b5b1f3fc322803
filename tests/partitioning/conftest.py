"""Independent judges: a replay and an exhaustive search written the slow and obvious way, and random timelines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement

import pytest

from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import HOST, ROOT, Timeline


def _random_timeline(rng: random.Random, blocks: int, *, events: int = 60, views: bool = False) -> Timeline:
    """Births and deaths in any order; a third of the storages hold a tensor that others hold as well.

    With `views`, copies of parts of living storages, and copies of those copies, are among them.
    """
    sizes: list[int] = []
    wholes: list[int] = []
    parts: dict[int, int] = {}  # value that copies of a whole's part share, by the whole
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
        whole = rng.choice(alive) if views and alive and rng.random() < 0.4 else -1
        if whole >= 0:
            own = wholes[whole] >= 0 and rng.random() < 0.5  # a copy of all of a part has the value of the part
            value = values[whole] if own and values[whole] >= 0 else parts.setdefault(whole, 5 + len(parts))
        wholes.append(whole)
        shared = 0 <= value < 5 and not views
        sizes.append(size_of_value[value] if shared else rng.randint(1, 9))
        values.append(value)
        owners.append(rng.choice([*range(blocks), ROOT, HOST]) if rng.random() < 0.3 else rng.randrange(blocks))
        order.append(len(sizes))
        alive.append(len(sizes) - 1)
    return Timeline(
        tuple(sizes),
        tuple(owners),
        tuple(values),
        tuple(order),
        wholes=tuple(wholes) if max(wholes, default=-1) >= 0 else (),
    )


def _naive_replay(timeline: Timeline, device_of: Sequence[int], root: int, devices: int) -> list[int]:
    """Every instant looked at afresh: which tensors does the device hold, and how large is the first holder of each?"""

    def home(storage: int) -> int:
        owner = timeline.owners[storage]
        return -1 if owner == HOST else root if owner == ROOT else device_of[owner]

    def tensor_of(storage: int) -> object:
        whole = timeline.wholes[storage] if timeline.wholes else -1
        if whole >= 0 and home(whole) == home(storage):
            return tensor_of(whole)
        value = timeline.values[storage]
        return ("shared", value) if value >= 0 else ("own", storage)

    peaks = [0] * devices
    for device in range(devices):
        holders: dict[object, set[int]] = {}
        size: dict[object, int] = {}
        for event in timeline.events:
            storage = abs(event) - 1
            if home(storage) != device:
                continue
            tensor = tensor_of(storage)
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
