from __future__ import annotations

import random
import sys
from itertools import product

import numpy as np
import pytest

from autobalance.partitioning.orders.odd_graphs import (
    MOST_BINARIES,
    OddGraph,
    crossings_between,
    place_parts,
)
from autobalance.partitioning.transfers import Crossing
from autobalance.profiling.timeline import ROOT

PARTS, DEVICES = 5, 3


def _random_graph(rng: random.Random) -> OddGraph:
    crossings = []
    for _ in range(4):
        source, *targets = rng.sample(range(PARTS), rng.randint(2, 3))
        crossings.append(Crossing(source, tuple(targets), rng.randint(1, 6), rng.random() < 0.5))
    return OddGraph(
        held=np.array([[rng.randint(0, 9) for _ in range(PARTS)] for _ in range(2)]),
        budgets=tuple(rng.choice([16, 22]) for _ in range(DEVICES)),
        chain=(0, 2, 3) if rng.random() < 0.7 else (),
        pins={rng.randrange(PARTS): rng.randrange(DEVICES)} if rng.random() < 0.5 else {},
        seconds=np.array([[float(rng.randint(1, 9))] * DEVICES for _ in range(PARTS)]),
        crossings=tuple(crossings),
        links=np.full((DEVICES, DEVICES), 2.0),
        micro_batches=rng.choice([1, 4]),
    )


def _allowed(graph: OddGraph, devices: tuple[int, ...]) -> bool:
    if any(devices[part] != device for part, device in graph.pins.items()):
        return False
    visits = [devices[part] for part in graph.chain]
    visits = [device for at, device in enumerate(visits) if at == 0 or visits[at - 1] != device]
    return len(set(visits)) == len(visits)


def _largest_use(graph: OddGraph, devices: tuple[int, ...]) -> float:
    return max(
        sum(int(held[part]) for part in range(PARTS) if devices[part] == device) / graph.budgets[device]
        for held in graph.held
        for device in range(DEVICES)
    )


def _step_time(graph: OddGraph, devices: tuple[int, ...]) -> float:
    if _largest_use(graph, devices) > 1:
        return float("inf")
    assert graph.seconds is not None
    busy = [sum(graph.seconds[part, 0] for part in range(PARTS) if devices[part] == each) for each in range(DEVICES)]
    for crossing in graph.crossings:
        for device in {devices[target] for target in crossing.targets} - {devices[crossing.source]}:
            busy[device] += crossing.nbytes * (2 if crossing.has_gradient else 1) / 2.0
    return sum(busy) + (graph.micro_batches - 1) * max(busy)


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("objective", ["largest use", "step time"])
def test_the_best_placement_of_all_is_found_and_proved(seed: int, objective: str) -> None:
    graph = _random_graph(random.Random(seed))
    judge = _largest_use if objective == "largest use" else _step_time
    best = min(judge(graph, devices) for devices in product(range(DEVICES), repeat=PARTS) if _allowed(graph, devices))
    found = place_parts(graph, objective)
    assert found is not None
    if best == float("inf"):
        assert found.devices is None
        return
    assert found.value == pytest.approx(best, rel=1e-6)
    assert found.bound == pytest.approx(best, rel=1e-6)
    assert found.devices is not None
    assert _allowed(graph, found.devices)
    assert judge(graph, found.devices) == pytest.approx(best, rel=1e-6)


def test_a_plan_that_is_the_best_already_is_proved_by_its_own_value() -> None:
    graph = OddGraph(held=np.array([[3, 3, 2]]), budgets=(8, 8))
    found = place_parts(graph, "largest use", cut_off=5 / 8)
    assert found is not None
    assert found.devices is None
    assert found.bound == pytest.approx(5 / 8, rel=1e-4)
    better = place_parts(graph, "largest use", cut_off=6 / 8)
    assert better is not None
    assert better.value == pytest.approx(5 / 8)


def test_too_many_parts_are_not_tried() -> None:
    assert place_parts(OddGraph(np.ones((1, MOST_BINARIES // 2 + 1), dtype=int), (9, 9)), "largest use") is None


def test_a_step_time_without_seconds_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the seconds of the parts and the links"):
        place_parts(OddGraph(np.array([[1]]), (9,)), "step time")


def test_what_is_missing_without_scipy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"autobalance\[solver\]"):
        place_parts(OddGraph(np.array([[1]]), (9,)), "largest use")


def test_crossings_inside_a_part_are_none_and_equal_ones_add_up() -> None:
    crossings = [
        Crossing(0, (1, 2), 8, True),
        Crossing(1, (2,), 4, True),
        Crossing(0, (1,), 5, False),
        Crossing(2, (ROOT,), 1, False),
    ]
    assert crossings_between(crossings, [(0, 1), (2,), (ROOT,)]) == (
        Crossing(0, (1,), 12, True),
        Crossing(1, (2,), 1, False),
    )
