from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.chains.chain import build_chain
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.orders.rounds import Rounds
from autobalance.partitioning.transfers import crossings_of
from autobalance.profiling.profile import Profile
from autobalance.schedules.clock import run_clock
from autobalance.schedules.launches import launch_order

MICRO_BATCHES = 3


def _problem(rng: random.Random, blocks: int, pins: dict[int, int] | None = None) -> Problem:
    profile = Profile.from_costs(
        static=[rng.randint(1, 9) for _ in range(blocks)],
        saved=[rng.randint(0, 9) for _ in range(blocks)],
        transient=[rng.randint(0, 9) for _ in range(blocks)],
        forward_time=[float(rng.randint(1, 9)) for _ in range(blocks)],
        backward_time=[float(rng.randint(1, 9)) for _ in range(blocks)],
        transfer=[rng.randint(1, 9) for _ in range(blocks - 1)],
    )
    devices = tuple(Device(f"device {index}", 1000, link=float(2 + index)) for index in range(3))
    chain = build_chain(profile, pins or {}, None, free_pins=False)
    given = (), "looped", MICRO_BATCHES, crossings_of(profile)
    return Problem(profile, chain, devices, (1000, 500, 250), *given)


def _ways(units: int, stages: int) -> list[tuple[int, ...]]:
    return list(combinations(range(1, units), stages - 1))


def _stages(cuts: tuple[int, ...], units: int) -> Iterator[tuple[int, int]]:
    return pairwise([0, *cuts, units])


@pytest.mark.parametrize("places", [[0, 1, 2, 0, 1], [2, 0, 2, 0], [1, 0, 2]])
def test_many_ways_at_once_take_as_long_as_their_clocks_say_one_by_one(places: list[int]) -> None:
    problem = _problem(random.Random(1), blocks=8)
    blocks, links = problem.profile.blocks, [device.link for device in problem.devices]
    ways = _ways(8, len(places))
    order = launch_order("looped", len(places), MICRO_BATCHES, devices=places)
    alone = []
    for cuts in ways:
        columns: list[list[float]] = [[], [], []]
        for number, (start, stop) in enumerate(_stages(cuts, 8)):
            columns[0].append(sum(block.forward_time for block in blocks[start:stop]))
            columns[1].append(sum(block.backward_time for block in blocks[start:stop]))
            link = min(links[places[number]], links[places[number - 1]])
            columns[2].append(2 * blocks[start].inputs / link)
        alone.append(max(slot.stop for slot in run_clock(order, places, *columns)))
    assert Rounds(problem, (), places).seconds(np.array(ways)) == pytest.approx(alone)


def test_bytes_are_those_of_all_visits_of_a_device_with_all_micro_batches_and_the_largest_transient() -> None:
    problem = _problem(random.Random(2), blocks=6)
    blocks = problem.profile.blocks
    (peaks,) = Rounds(problem, (), [0, 1, 0]).peaks(np.array([[2, 4]]))
    for device, here in ((0, [0, 1, 4, 5]), (1, [2, 3]), (2, [])):
        held = sum(blocks[block].static + MICRO_BATCHES * blocks[block].saved for block in here)
        assert peaks[device] == held + max([blocks[block].forward_transient for block in here], default=0)


@pytest.mark.parametrize("seed", range(6))
def test_no_way_has_a_shorter_longest_stage_or_a_smaller_largest_share_than_the_even_ones(seed: int) -> None:
    rng = random.Random(seed)
    problem = _problem(rng, blocks=9, pins={4: 1} if seed % 2 else None)
    blocks, links = problem.profile.blocks, [device.link for device in problem.devices]
    places = [0, 1, 2, 0, 1]
    rounds = Rounds(problem, (), places)

    def longest(cuts: tuple[int, ...]) -> float:
        return max(
            sum(block.forward_time + block.backward_time for block in blocks[start:stop])
            + 2 * blocks[start].inputs / min(links[places[number]], links[places[number - 1]])
            for number, (start, stop) in enumerate(_stages(cuts, 9))
        )

    def fullest(cuts: tuple[int, ...]) -> float:
        return max(
            sum(block.static + MICRO_BATCHES * block.saved for block in blocks[start:stop]) / budget
            for (start, stop), budget in zip(_stages(cuts, 9), [1000, 500, 250, 1000, 500], strict=True)
        )

    def is_bound(cuts: tuple[int, ...]) -> bool:
        inside = [places[number] for number, (start, stop) in enumerate(_stages(cuts, 9)) if start <= 4 < stop]
        return not problem.chain.bound or inside == [1]

    allowed = [cuts for cuts in _ways(9, 5) if is_bound(cuts)]
    assert rounds.keeps_bounds(np.array(_ways(9, 5))).tolist() == [is_bound(cuts) for cuts in _ways(9, 5)]
    in_time = rounds.even_in_time(0, 5, 0, 9)
    in_bytes = rounds.even_in_bytes(0, 5, 0, 9, np.array([1000.0, 500.0, 250.0]))
    assert in_time in allowed
    assert in_bytes in allowed
    assert longest(in_time) == pytest.approx(min(map(longest, allowed)))
    assert fullest(in_bytes) == pytest.approx(min(map(fullest, allowed)))
