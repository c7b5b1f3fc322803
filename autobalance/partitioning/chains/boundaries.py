"""Boundary local search: cuts move unit by unit where the step's clock says more than the tables can.

With what lies beside the chain, the device that holds it may change places with another one in the call order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.chains.solution import Solution
from autobalance.partitioning.judge import seconds_of

# A plan gains little after so many moves, each of which looks at all neighbours.
_MOST_MOVES = 30


def with_better_boundaries(problem: Problem, solution: Solution, margin: float = 1.0) -> Solution:
    """A solution of which no single cut can move, and no device with items change its place, to make the step shorter.

    What the tables say of memory is kept; a replay has the last word.

    Example:
        >>> with_better_boundaries(problem, problem.solve(auto)).stages

    Args:
        problem: that it solves.
        solution: whose blocks keep what they save.
        margin: by which devices are taken to hold more than the tables say.
    """
    least = _seconds(problem, solution)
    for _ in range(_MOST_MOVES):
        fitting = [other for other in _neighbours(problem, solution) if _may_fit(problem, other, margin)]
        neighbours = [(_seconds(problem, other), other) for other in fitting]
        seconds, other = min(neighbours, key=lambda pair: pair[0], default=(least, solution))
        if seconds >= least:
            break
        least, solution = seconds, other
    return solution


def _neighbours(problem: Problem, solution: Solution) -> Iterator[Solution]:
    """All solutions with one cut a unit further on or back, which may empty a stage, or with two devices swapped."""
    stages = solution.stages
    for at, (device, start, stop) in enumerate(stages):
        for other_at, (other, i, j) in enumerate(stages):
            if device in solution.items and other != device:
                swapped = list(stages)
                swapped[at], swapped[other_at] = (other, start, stop), (device, i, j)
                yield from _as_solution(problem, solution, tuple(swapped))
    for at, ((left, start, cut), (right, _, stop)) in enumerate(pairwise(stages)):
        for moved in (cut - 1, cut + 1):
            pair = [(left, start, moved), (right, moved, stop)]
            others = tuple(stage for stage in (*stages[:at], *pair, *stages[at + 2 :]) if stage[1] < stage[2])
            yield from _as_solution(problem, solution, others)


def _as_solution(problem: Problem, solution: Solution, stages: tuple[tuple[int, int, int], ...]) -> Iterator[Solution]:
    bound = problem.chain.bound
    if all(bound.get(unit, device) == device for device, start, stop in stages for unit in range(start, stop)):
        assignment, root = problem.chain.assignment(stages, solution.items)
        yield replace(solution, assignment=assignment, root=root, stages=stages, proved=False)


def _may_fit(problem: Problem, solution: Solution, margin: float) -> bool:
    return all(margin * told <= budget for told, budget in zip(problem.told(solution), problem.budgets, strict=True))


def _seconds(problem: Problem, solution: Solution) -> float:
    return seconds_of(
        problem.profile,
        solution.assignment,
        solution.root,
        problem.devices,
        problem.crossings,
        schedule=problem.schedule,
        micro_batches=problem.micro_batches,
    )
