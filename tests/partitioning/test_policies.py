from __future__ import annotations

import random
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest

from autobalance.partitioning.policies import balanced_low_0, policy_name, sequential


def _sums(costs: list[int], budgets: list[float]) -> list[np.ndarray]:
    units = len(costs)
    uses = []
    for budget in budgets:
        use = np.full((units + 1, units + 1), np.inf)
        for start in range(units + 1):
            for stop in range(start, units + 1):
                if (total := sum(costs[start:stop])) <= budget:
                    use[start, stop] = total / budget
        uses.append(use)
    return uses


def _all_cuts(units: int, devices: int) -> list[tuple[int, ...]]:
    return [(0, *inner, units) for inner in combinations_with_replacement(range(units + 1), devices - 1)]


def _instance(seed: int) -> tuple[list[int], list[float], list[np.ndarray], list[tuple[int, ...]]]:
    rng = random.Random(seed)
    costs = [rng.randint(1, 6) for _ in range(rng.randint(1, 6))]
    budgets = [float(rng.randint(3, 16)) for _ in range(rng.randint(1, 4))]
    uses = _sums(costs, budgets)
    feasible = [
        cuts
        for cuts in _all_cuts(len(costs), len(budgets))
        if all(np.isfinite(uses[d][cuts[d], cuts[d + 1]]) for d in range(len(budgets)))
    ]
    return costs, budgets, uses, feasible


@pytest.mark.parametrize("seed", range(80))
def test_sequential_uses_the_fewest_devices_and_fills_them_in_order(seed: int) -> None:
    _, budgets, uses, feasible = _instance(seed)
    found = sequential(uses, [False] * len(budgets))
    if not feasible:
        assert found is None
        return
    assert found is not None
    _, cuts = found
    used = [sum(start < stop for start, stop in pairwise(c)) for c in feasible]
    fewest = [cuts for cuts, count in zip(feasible, used, strict=True) if count == min(used)]
    # Filled in order: device 0 holds as many blocks as any of them, then device 1, and so on.
    assert cuts == max(fewest)


@pytest.mark.parametrize("seed", range(80))
def test_low_0_keeps_device_0_as_empty_as_the_others_allow_and_balances_them(seed: int) -> None:
    _, budgets, uses, feasible = _instance(seed)
    found = balanced_low_0(uses, [False] * len(budgets))
    if not feasible:
        assert found is None
        return
    assert found is not None

    def key(cuts: tuple[int, ...]) -> tuple[float, ...]:
        stages = [uses[d][cuts[d], cuts[d + 1]] for d in range(len(budgets))]
        empty = sum(cuts[d] == cuts[d + 1] for d in range(1, len(budgets)))
        rest = sorted(stages[1:], reverse=True)
        return (stages[0], *rest[:1], empty, *rest)

    assert key(found[1]) == min(key(cuts) for cuts in feasible)


def test_policies_have_the_names_that_users_know() -> None:
    assert policy_name("auto") == "balanced"
    assert policy_name("minimize_first_gpu_memory") == "balanced_low_0"
    with pytest.raises(ValueError, match=r"policy='fast' does not exist; choose one of auto, .*balanced_low_0"):
        policy_name("fast")
