from __future__ import annotations

import random

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.chains.boundaries import with_better_boundaries
from autobalance.partitioning.chains.chain import build_chain
from autobalance.partitioning.chains.policies import auto
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.chains.solution import Solution
from autobalance.partitioning.micro_profiles import micro_profile
from autobalance.partitioning.score import score
from autobalance.partitioning.transfers import crossings_of
from autobalance.profiling.profile import Profile

DEVICES = (Device("a", 100, link=10.0), Device("b", 100, link=10.0), Device("c", 100, link=10.0))


def _asked(seed: int) -> tuple[Profile, Problem, Solution]:
    """Blocks of which the first and the last share a device, which is thus visited twice."""
    draw = random.Random(seed)
    count = draw.randint(6, 8)
    whole = Profile.from_costs(
        [draw.randint(1, 6) for _ in range(count)],
        forward_time=[draw.randint(1, 9) * 4.0 for _ in range(count)],
        backward_time=[draw.randint(1, 9) * 4.0 for _ in range(count)],
        transfer=[draw.randint(0, 20) * 4 for _ in range(count - 1)],
        together=[(0, count - 1)],
        batch_size=4,
    )
    part = micro_profile(whole, 4)
    chain = build_chain(part, {}, None, free_pins=False)
    problem = Problem(part, chain, DEVICES, (16, 16, 16), (), "1f1b", 4, crossings_of(part))
    found = problem.solve(auto)
    assert found is not None
    return whole, problem, found


def _seconds(whole: Profile, solution: Solution) -> float:
    return score(whole, solution.assignment, DEVICES, root=solution.root, micro_batches=4, schedule="1f1b").step_time


def _shifted(assignment: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Assignments of which one block beside a cut is on the other side of it; the first and the last stay."""
    inner = assignment[1:-1]
    found = []
    for at in range(1, len(inner)):
        if inner[at - 1] != inner[at]:
            for block, place in ((at - 1, inner[at]), (at, inner[at - 1])):
                found.append((assignment[0], *inner[:block], place, *inner[block + 1 :], assignment[-1]))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_no_cut_can_move_to_make_the_step_shorter(seed: int) -> None:
    whole, problem, found = _asked(seed)
    moved = with_better_boundaries(problem, found)
    seconds = _seconds(whole, moved)
    assert seconds <= _seconds(whole, found)
    assert moved.assignment[0] == moved.assignment[-1], "what shares a device still does"
    for assignment in _shifted(moved.assignment):
        other = score(whole, assignment, DEVICES, root=assignment[-1], micro_batches=4, schedule="1f1b")
        held = [
            sum(row.static for row, place in zip(whole.blocks, assignment, strict=True) if place == device)
            for device in range(3)
        ]
        assert other.step_time >= seconds * (1 - 1e-9) or max(held) > 16


def test_boundaries_move_where_the_clock_says_so_and_memory_allows() -> None:
    gains = []
    for seed in range(12):
        whole, problem, found = _asked(seed)
        gains.append(_seconds(whole, found) - _seconds(whole, with_better_boundaries(problem, found)))
        assert with_better_boundaries(problem, found, margin=100.0) == found, "nothing fits with so little room"
    assert max(gains) > 0
