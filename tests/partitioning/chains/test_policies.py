from __future__ import annotations

import random
from itertools import combinations, permutations

import pytest

from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.chains.policies import policy_name
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile


def _ways(blocks: int, devices: int) -> list[list[tuple[int, int, int]]]:
    """All stages (device, start, stop) of a chain: any cuts on any devices in any order."""
    found = []
    for count in range(1, min(blocks, devices) + 1):
        for cuts in combinations(range(1, blocks), count - 1):
            edges = (0, *cuts, blocks)
            for order in permutations(range(devices), count):
                found.append([(device, edges[at], edges[at + 1]) for at, device in enumerate(order)])
    return found


def _instance(seed: int) -> tuple[list[int], list[int], list[list[tuple[int, int, int]]]]:
    rng = random.Random(seed)
    costs = [rng.randint(1, 6) for _ in range(rng.randint(1, 6))]
    budgets = [rng.randint(3, 16) for _ in range(rng.randint(1, 4))]
    feasible = [
        way
        for way in _ways(len(costs), len(budgets))
        if all(sum(costs[start:stop]) <= budgets[device] for device, start, stop in way)
    ]
    return costs, budgets, feasible


@pytest.mark.parametrize("seed", range(60))
def test_sequential_uses_the_fewest_devices_and_fills_them_in_the_given_order(seed: int) -> None:
    costs, budgets, feasible = _instance(seed)
    in_order = [way for way in feasible if [device for device, _, _ in way] == sorted(device for device, _, _ in way)]
    if not in_order:
        with pytest.raises(InfeasiblePlanError):
            plan(Profile.from_costs(costs), budgets, policy="sequential")
        return
    found = plan(Profile.from_costs(costs), budgets, policy="sequential")
    fewest = min(map(len, in_order))

    def filling(way: list[tuple[int, int, int]]) -> list[int]:
        held = [0] * len(budgets)
        for device, start, stop in way:
            held[device] = stop - start
        return held

    # Filled in order: device 0 holds as many blocks as any of them, then device 1, and so on.
    best = max(filling(way) for way in in_order if len(way) == fewest)
    assert [found.assignment.count(device) for device in range(len(budgets))] == best


@pytest.mark.parametrize("seed", range(60))
def test_low_0_keeps_device_0_as_empty_as_the_others_allow_and_balances_them(seed: int) -> None:
    costs, budgets, feasible = _instance(seed)
    if not feasible:
        with pytest.raises(InfeasiblePlanError):
            plan(Profile.from_costs(costs), budgets, policy="balanced_low_0")
        return

    def key(uses: list[float]) -> tuple[float, float]:
        return uses[0], max(uses[1:], default=0.0)

    def uses_of(way: list[tuple[int, int, int]]) -> list[float]:
        uses = [0.0] * len(budgets)
        for device, start, stop in way:
            uses[device] = sum(costs[start:stop]) / budgets[device]
        return uses

    found = plan(Profile.from_costs(costs), budgets, policy="balanced_low_0")
    assert key(list(found.uses)) == min(key(uses_of(way)) for way in feasible)
    assert found.optimal


def _timed(rng: random.Random, blocks: int) -> Profile:
    return Profile.from_costs(
        static=[rng.randint(1, 6) for _ in range(blocks)],
        forward_time=[rng.randint(1, 5) for _ in range(blocks)],
        transfer=[rng.choice([0, 10, 200]) * 10**9 for _ in range(blocks - 1)],
    )


@pytest.mark.parametrize("seed", range(40))
def test_auto_takes_little_more_time_than_any_and_of_these_fills_devices_the_least(seed: int) -> None:
    rng = random.Random(seed)
    profile = _timed(rng, rng.randint(2, 6))
    budgets = [rng.randint(6, 20)] * rng.randint(2, 3)
    link = 2.5e10  # bytes per second between devices of which only the size is said
    known = []
    for way in _ways(len(profile.blocks), len(budgets)):
        held = [sum(profile.blocks[k].weights for k in range(start, stop)) for _, start, stop in way]
        if max(held) <= budgets[0]:
            moved = sum(profile.blocks[start - 1].outputs for _, start, _ in way if start)
            seconds = sum(block.forward_time for block in profile.blocks) + 2 * moved / link
            known.append((seconds, max(held) / budgets[0]))
    if not known:
        with pytest.raises(InfeasiblePlanError):
            plan(profile, budgets)
        return
    found = plan(profile, budgets)
    fastest = min(seconds for seconds, _ in known)
    assert found.step_time <= fastest * 1.02 * (1 + 1e-9)
    assert max(found.uses) == min(use for seconds, use in known if seconds <= fastest * 1.02)
    assert found.optimal
    assert found.bounds["memory"] == pytest.approx(fastest)


def test_policies_have_the_names_that_users_know() -> None:
    assert policy_name("auto") == "auto"
    assert policy_name("minimize_first_gpu_memory") == "balanced_low_0"
    with pytest.raises(ValueError, match=r"policy='fast' does not exist; choose one of auto, .*balanced_low_0"):
        policy_name("fast")
