"""Looped plans: stages visit devices more than once, each round from the first device again.

A chain that is cut into more stages than there are devices fills its pipeline sooner: with `v` rounds over `K` devices
and `m` micro-batches, devices wait for `(K - 1) / v` of a micro-batch's time in place of `K - 1` (Narayanan et al.,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, section 2.2). Chains that
know nothing of one another begin a round each, so that every device holds a piece of each of them.

How rounds interlock is known to no formula that a dynamic programme could minimise: they are searched by moving cuts,
without a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autobalance.partitioning.independent import Part, independent_parts
from autobalance.partitioning.judge import Judged, judge
from autobalance.partitioning.policies import NEARLY, balanced
from autobalance.partitioning.problem import Problem, Solution
from autobalance.partitioning.rounds import Costs, Cuts, Rounds, Ways
from autobalance.partitioning.step_time import PRECISION

# Ways of one step of a search, and launches that are timed in one search.
_MOST_NEIGHBOURS = 512
_MOST_LAUNCHES = 10**8
# Searches after each of which the replay corrects the estimate.
_CORRECTIONS = 6
_ENOUGH = 2  # that fit
# Further rounds in a row that gain nothing, after which no more are tried: stages of whole blocks are not always even.
_PATIENCE = 2

Key = tuple[float, ...]


@dataclass(frozen=True)
class Looped:
    """A looped partition, replayed.

    Attributes:
        solution: in the form of the other searches; nothing about it is proved.
        judged: its replay.
    """

    solution: Solution
    judged: Judged

    @property
    def key(self) -> Key:
        """What the policy minimises."""
        return self.solution.key


def best_loop(problem: Problem, policy: str, like: Solution | None = None) -> Looped | None:
    """The best looped partition that is found.

    Under the schedule `"looped"` a chain goes round as often as that gains something; chains that are independent go
    round once each, under the naive schedule as well.

    Example:
        >>> best_loop(problem, "auto")

    Args:
        problem: whose chain is cut.
        policy: `"auto"`, `"balanced"` or `"balanced_low_0"`.
        like: partition without rounds whose order of devices, and places beside the chain, are kept; None: the one that
            is short of the least memory.

    Returns:
        None where there is nothing to loop over, or nothing that fits was found.
    """
    parts = independent_parts(problem.profile.timeline, problem.crossings, problem.chain.units)
    goes_round = problem.schedule == "looped"
    if policy not in _KEYS or not (goes_round or (problem.schedule == "naive" and len(parts) > 1)):
        return None
    like = like or problem.solve(balanced, hard=False)
    assert like is not None, "without budgets every chain can be cut"
    search = _Search(problem, policy, like)
    used = list(dict.fromkeys(device for device, _, _ in like.stages))
    others = [device for device in range(len(problem.devices)) if device not in used and problem.budgets[device] > 0]
    for order in [used, [*used, *others]] if others and policy != "balanced_low_0" else [used]:
        if len(order) > 1 and len(parts) > 1:
            search.go(order, parts, visits=1)
        if len(order) > 1 and goes_round:
            search.go_round(order)
    return search.best


_KEYS: dict[str, Callable[[Costs, Costs], tuple[Costs, ...]]] = {
    "auto": lambda uses, seconds: (seconds, uses.max(axis=0)),
    "balanced": lambda uses, seconds: (uses.max(axis=0), (uses**2).sum(axis=0)),
    "balanced_low_0": lambda uses, seconds: (uses[0], uses[1:].max(axis=0, initial=0.0)),
}


class _Search:
    """All looped partitions that are found for one problem."""

    def __init__(self, problem: Problem, policy: str, like: Solution) -> None:
        self._problem, self._policy, self._like = problem, policy, like
        self._budgets = np.array(problem.budgets, dtype=np.float64)
        self._excess = np.array(problem.excess, dtype=np.float64)
        self._found: list[Looped] = []

    @property
    def best(self) -> Looped | None:
        """Of all that fit the best by the policy."""
        if not self._found:
            return None
        first = min(self._found, key=lambda found: found.key)
        if self._policy != "auto":
            return first
        near = [found for found in self._found if found.judged.seconds <= self._limit(first.judged.seconds)]
        if not near:
            return None
        lightest = min(near, key=lambda found: (found.key[1], found.key[0]))
        key = first.key[0], lightest.key[1]
        return replace(lightest, solution=replace(lightest.solution, key=key))

    def _limit(self, least: float) -> float:
        """Seconds within which the lightest way is wanted, of which the fastest takes `least`."""
        return least * (1 + NEARLY) if self._problem.limit is None else self._problem.limit

    def go_round(self, order: Sequence[int]) -> None:
        """The whole chain, twice, three times and so on, as long as that gains something."""
        units = len(self._problem.chain.units)
        least, visits, idle = np.inf, 2, 0
        # The last round may be one of fewer devices.
        while (visits - 1) * len(order) < units and idle < _PATIENCE:
            now = self.go(order, [(0, units)], visits)
            idle = 0 if now < least * (1 - NEARLY) else idle + 1
            least, visits = min(least, now), visits + 1

    def go(self, order: Sequence[int], parts: Sequence[Part], visits: int) -> float:
        """Every part so many times round the devices; the first entry of the least key that was found."""
        stages, places = [0], list[int]()
        for start, stop in parts:
            count = min(visits * len(order), stop - start)
            places += [order[stage % len(order)] for stage in range(count)]
            stages.append(len(places))
        rounds = Rounds(self._problem, self._like.items, places)
        layout = [(*ends, *part) for ends, part in zip(pairwise(stages), parts, strict=True)]
        fixed = frozenset(stage - 1 for stage in stages[1:-1])
        starts = [
            _joined([rounds.even_in_time(*each) for each in layout], parts),
            _joined([rounds.even_in_bytes(*each, self._budgets) for each in layout], parts),
        ]
        return self._refine(rounds, [cuts for cuts in starts if cuts is not None], fixed)

    def _refine(self, rounds: Rounds, starts: Sequence[Cuts], fixed: frozenset[int]) -> float:
        """Search by estimate, replay what was found, and search again with what the replay knew better."""
        more = np.zeros(len(self._budgets))
        seen: set[Cuts] = set()
        least, fitting = np.inf, 0
        for _ in range(_CORRECTIONS if starts else 0):
            cuts = self._searched(rounds, starts, fixed, more)
            if cuts in seen:
                break
            seen.add(cuts)
            solution, judged = self._judged(rounds, cuts)
            if all(peak <= budget for peak, budget in zip(self._held(judged.peaks), self._budgets, strict=True)):
                self._found.append(Looped(solution, judged))
                least, fitting = min(least, solution.key[0]), fitting + 1
            if fitting == _ENOUGH:
                break
            more = np.array(judged.peaks) - rounds.peaks(np.array([cuts]))[0]
            starts = [cuts]
        return float(least)

    def _searched(self, rounds: Rounds, starts: Sequence[Cuts], fixed: frozenset[int], more: Costs) -> Cuts:
        limit = np.inf

        def fastest(ways: Ways) -> Costs:
            return self._costs(rounds, ways, more)

        def evenest(ways: Ways) -> Costs:
            return self._costs(rounds, ways, more, limit)

        steps = max(1, _MOST_LAUNCHES // (_MOST_NEIGHBOURS * rounds.launches))

        def neighbours(cuts: Cuts) -> Ways:
            return _neighbours(cuts, rounds.units, fixed)

        cuts, (_, least, *_) = _descend(starts, fastest, neighbours, steps)
        if self._policy == "auto":
            limit = self._limit(least)
            cuts, _ = _descend([cuts], evenest, neighbours, steps)
        return cuts

    def _costs(self, rounds: Rounds, ways: Ways, more: Costs, limit: float | None = None) -> Costs:
        """`[way, entry]`: bytes over the budgets, then the policy's key; within a limit of seconds the balanced one."""
        held = self._held(rounds.peaks(ways) + more)
        over = np.maximum(0.0, held - self._budgets).sum(axis=1)
        over[~rounds.keeps_bounds(ways)] = np.inf
        uses = held / np.maximum(1.0, self._budgets)
        seconds = rounds.seconds(ways) if self._policy == "auto" else np.zeros(len(ways))
        if limit is None:
            return np.column_stack([over, *_KEYS[self._policy](uses.T, seconds)])
        return np.column_stack([over, np.maximum(0.0, seconds - limit), *_KEYS["balanced"](uses.T, seconds)])

    def _judged(self, rounds: Rounds, cuts: Cuts) -> tuple[Solution, Judged]:
        problem, like = self._problem, self._like
        bounds = pairwise([0, *cuts, rounds.units])
        stages = tuple((device, *ends) for device, ends in zip(rounds.places, bounds, strict=True))
        assignment, root = problem.chain.assignment(stages, like.items)
        judged = judge(
            problem.profile,
            assignment,
            root,
            problem.devices,
            problem.crossings,
            schedule=problem.schedule,
            micro_batches=problem.micro_batches,
        )
        uses = self._held(judged.peaks) / np.maximum(1.0, self._budgets)
        key = tuple(float(entry) for entry in _KEYS[self._policy](uses, np.array(judged.seconds)))
        return Solution(key, assignment, root, False, stages, like.items), judged

    def _held(self, peaks: Costs | Sequence[int]) -> Costs:
        """Bytes with those by which a device is known to stand above the replay."""
        bytes_of = np.asarray(peaks, dtype=np.float64)
        held: Costs = np.where(bytes_of > 0, bytes_of + self._excess, 0.0)
        return held


def _joined(cuts: Sequence[Cuts | None], parts: Sequence[Part]) -> Cuts | None:
    """Cuts of all parts one after the other, with the ends of the parts between them."""
    found: list[int] = []
    for inside, (_, stop) in zip(cuts, parts, strict=True):
        if inside is None:
            return None
        found += [*inside, stop]
    return tuple(found[:-1])


def _descend(
    starts: Sequence[Cuts], costs: Callable[[Ways], Costs], neighbours: Callable[[Cuts], Ways], steps: int
) -> tuple[Cuts, Key]:
    """From the best of several ways on take the best neighbour, again and again, until none is better."""
    best: Cuts | None = None
    least: Key = (np.inf,)
    ways = np.array(starts, dtype=np.int64)
    for _ in range(1 + steps):
        keys = costs(ways)
        first = int(np.lexsort(keys.T[::-1])[0])
        price = tuple(keys[first].tolist())
        if best is not None and not _is_less(price, least):
            break
        best, least = tuple(ways[first].tolist()), price
        ways = neighbours(best)
        if not len(ways):
            break
    assert best is not None, "there is a way to start from"
    return best, least


def _is_less(key: Key, other: Key) -> bool:
    """Whether the first entries that differ by more than rounding differ downwards."""
    pairs = ((mine, theirs) for mine, theirs in zip(key, other, strict=True))
    return next((mine < theirs for mine, theirs in pairs if abs(mine - theirs) > PRECISION * abs(theirs)), False)


def _neighbours(cuts: Cuts, units: int, fixed: frozenset[int]) -> Ways:
    """Ways in which one stage has given a unit to another one, and those between them have moved by one.

    Of many stages only those that are near one another give and take.
    """
    count = len(cuts)
    farthest = max(1, _MOST_NEIGHBOURS // max(1, 2 * count))
    pairs = [(i, j) for i in range(count) for j in range(i, min(count, i + farthest))]
    first, last = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    here = np.arange(count)
    moved = (first[:, None] <= here) & (here <= last[:, None])
    moved = moved[~moved[:, sorted(fixed)].any(axis=1)]
    ways: Ways = np.concatenate([np.array(cuts, dtype=np.int64) - moved, np.array(cuts, dtype=np.int64) + moved])
    bounds = np.pad(ways, ((0, 0), (1, 1)))
    bounds[:, -1] = units
    return ways[(np.diff(bounds, axis=1) > 0).all(axis=1)]
