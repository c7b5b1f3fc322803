from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import combinations_with_replacement, permutations, product

import numpy as np
import pytest

from autobalance.partitioning.chains.chain import build_chain
from autobalance.partitioning.orders.item_search import ItemSearch
from autobalance.partitioning.orders.local_search import placement_moves
from autobalance.partitioning.replay import replay
from autobalance.partitioning.transfers import crossings_of
from autobalance.profiling.profile import Profile

DEVICES = 3
Places = tuple[int, ...]


def _search(rng: random.Random, transient: int) -> tuple[ItemSearch, Callable[[Places], tuple[float, ...]]]:
    """Two groups of blocks beside a chain of four units, and the least largest use for a placement of the groups."""
    profile = Profile.from_costs(
        static=[rng.randint(1, 9) for _ in range(8)],
        saved=[rng.randint(0, 9) for _ in range(8)],
        transient=[rng.randint(0, transient) for _ in range(8)],
        together=[(0, 4), (2, 6)],
    )
    chain = build_chain(profile, {}, None, free_pins=False)
    budgets = tuple(rng.randint(30, 40) for _ in range(DEVICES))
    links = np.ones((DEVICES, DEVICES))
    search = ItemSearch(chain, profile.timeline, budgets, np.ones((8, DEVICES)), links, crossings_of(profile))

    def cost(placement: Places) -> tuple[float, ...]:
        least = float("inf")
        for cuts in combinations_with_replacement(range(len(chain.units) + 1), DEVICES - 1):
            ends = [0, *cuts, len(chain.units)]
            for order in permutations(range(DEVICES)):
                stages = [(order[at], ends[at], ends[at + 1]) for at in range(DEVICES)]
                assignment, root = chain.assignment(stages, placement)
                peaks = replay(profile.timeline, assignment, root, DEVICES)
                least = min(least, max(peak / budget for peak, budget in zip(peaks, budgets, strict=True)))
        return (least,)

    return search, cost


@pytest.mark.parametrize("seed", range(4))
def test_where_the_linear_model_is_exact_the_best_placement_is_found_and_proved(seed: int) -> None:
    search, cost = _search(random.Random(seed), transient=0)
    best = min(cost(placement) for placement in product(range(DEVICES), repeat=2))
    found = search.best(cost, "largest use")
    assert cost(found.placement) == best
    assert found.bound == pytest.approx(best[0], rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_for_every_placement(seed: int) -> None:
    search, cost = _search(random.Random(seed), transient=9)
    found = search.best(cost, "largest use")
    best = min(cost(placement) for placement in product(range(DEVICES), repeat=2))
    assert found.bound is not None
    assert found.bound <= best[0] <= cost(found.placement)[0]


def test_what_has_no_bound_is_searched_all_the_same() -> None:
    search, cost = _search(random.Random(0), transient=0)
    found = search.best(cost, None)
    assert found.bound is None
    neighbours = placement_moves(found.placement, range(2), DEVICES)
    assert cost(found.placement) <= min(cost(placement) for placement in neighbours)


def test_a_search_without_scipy_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    search, cost = _search(random.Random(0), transient=0)
    with pytest.warns(UserWarning, match="one by one, without a bound"):
        assert search.best(cost, "largest use").bound is None
