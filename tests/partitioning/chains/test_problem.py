from __future__ import annotations

import random
from itertools import product

import pytest

import autobalance.partitioning.chains.problem as problem_module
from autobalance.devices.words import parse_devices
from autobalance.partitioning.chains.chain import build_chain
from autobalance.partitioning.chains.policies import balanced
from autobalance.partitioning.chains.problem import Problem
from autobalance.profiling.profile import Profile


def _problem(profile: Profile, budgets: tuple[int, ...]) -> Problem:
    chain = build_chain(profile, {}, None, free_pins=False)
    return Problem(profile, chain, parse_devices(list(budgets)), budgets)


def test_without_hard_budgets_there_is_always_a_way() -> None:
    problem = _problem(Profile.from_costs([4, 4]), (3, 0))
    assert problem.solve(balanced) is None
    solution = problem.solve(balanced, hard=False)
    assert solution is not None
    assert solution.assignment == (0, 0), "a device without any budget is the last to be used"


@pytest.mark.parametrize("seed", range(20))
def test_several_groups_are_exact_over_all_their_devices(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 9) for _ in range(7)]
    groups = [(0, 6), (2, 5)]
    solution = _problem(Profile.from_costs(sizes, together=groups), (100, 100)).solve(balanced)
    assert solution is not None
    assert solution.proved
    least = min(
        max(sum(size for size, place in zip(sizes, places, strict=True) if place == device) for device in (0, 1))
        for places in product(range(2), repeat=7)
        if places[0] == places[6] and places[2] == places[5] and (places[1] == places[3] or places[3] == places[4])
    )
    assert solution.key[0] == least / 100


@pytest.mark.parametrize("seed", range(10))
def test_taking_turns_finds_a_way_but_claims_no_proof(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 9) for _ in range(8)]
    profile = Profile.from_costs(sizes, together=[(0, 7), (2, 5)])
    exact = _problem(profile, (100,) * 3).solve(balanced)
    monkeypatch.setattr(problem_module, "MOST_COMBINATIONS", 1)
    turns = _problem(profile, (100,) * 3).solve(balanced)
    assert exact is not None
    assert turns is not None
    assert not turns.proved
    assert turns.assignment[0] == turns.assignment[7]
    assert exact.key[0] <= turns.key[0] <= 2 * exact.key[0]


def test_devices_that_may_change_places_are_tried_once() -> None:
    groups = [(0, 5), (1, 4)]
    chain = build_chain(Profile.from_costs([1] * 6, together=groups), {}, None, free_pins=False)
    alike = Problem(Profile.from_costs([1] * 6), chain, parse_devices([9] * 8), (9,) * 8)
    # Both on the first device, or the second on the next one: all other ways are like these.
    assert alike._placements(balanced) == [(0, 0), (0, 1)]
