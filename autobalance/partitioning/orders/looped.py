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

from autobalance.partitioning.chains.policies import NEARLY, balanced
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.chains.solution import Solution
from autobalance.partitioning.judge import Judged
from autobalance.partitioning.orders.cut_descent import MOST_NEIGHBOURS, Key, descend, neighbours
from autobalance.partitioning.orders.independent import Part, independent_parts
from autobalance.partitioning.orders.rounds import Costs, Cuts, Rounds, Ways, recomputing
from autobalance.partitioning.savings.savings import KEEP, RECOMPUTE

# Launches that are timed in one search.
_MOST_LAUNCHES = 10**8
# Searches after each of which the replay corrects the estimate.
_CORRECTIONS = 6
_ENOUGH = 2  # that fit
# Further rounds in a row that gain nothing, after which no more are tried: stages of whole blocks are not always even.
_PATIENCE = 2


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
        layout = [(*ends, *part) for ends, part in zip(pairwise(stages), parts, strict=True)]
        fixed = frozenset(stage - 1 for stage in stages[1:-1])
        least = np.inf
        # Blocks run again only where nothing fits without.
        for saving in self._savings:
            rounds = Rounds(self._problem, self._like.items, places, saving)
            starts = [
                _joined([rounds.even_in_time(*each) for each in layout], parts),
                _joined([rounds.even_in_bytes(*each, self._budgets) for each in layout], parts),
            ]
            least = self._refine(rounds, [cuts for cuts in starts if cuts is not None], fixed)
            if np.isfinite(least):
                break
        return least

    @property
    def _savings(self) -> list[tuple[str, ...]]:
        """All blocks keep what they save; where that is allowed, all recompute it that can."""
        allowed = self._problem.allowed
        if allowed is None or not allowed.recompute or not self._problem.profile.training:
            return [()]
        return [(), recomputing(self._problem.profile)]

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
            told = self._restored(rounds, cuts, more)
            solution, judged = self._judged(told, cuts)
            if all(peak <= budget for peak, budget in zip(self._held(judged.peaks), self._budgets, strict=True)):
                self._found.append(Looped(solution, judged))
                least, fitting = min(least, solution.key[0]), fitting + 1
            if fitting == _ENOUGH:
                break
            more = np.array(judged.peaks) - told.peaks(np.array([cuts]))[0]
            starts = [cuts]
        return float(least)

    def _searched(self, rounds: Rounds, starts: Sequence[Cuts], fixed: frozenset[int], more: Costs) -> Cuts:
        limit = np.inf

        def fastest(ways: Ways) -> Costs:
            return self._costs(rounds, ways, more)

        def evenest(ways: Ways) -> Costs:
            return self._costs(rounds, ways, more, limit)

        steps = max(1, _MOST_LAUNCHES // (MOST_NEIGHBOURS * rounds.launches))

        def near(cuts: Cuts) -> Ways:
            return neighbours(cuts, rounds.units, fixed)

        cuts, (_, least, *_) = descend(starts, fastest, near, steps)
        if self._policy == "auto":
            limit = self._limit(least)
            cuts, _ = descend([cuts], evenest, near, steps)
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

    def _restored(self, rounds: Rounds, cuts: Cuts, more: Costs) -> Rounds:
        """The same where as many blocks keep what they save as there is room for, the slowest for their bytes first."""
        if not rounds.saving:
            return rounds
        problem = self._problem
        room = self._budgets - self._held(rounds.peaks(np.array([cuts])) + more)[0]
        assignment, _ = problem.chain.assignment(rounds.stages(cuts), self._like.items)
        freed, seconds = rounds.freed_bytes, problem.block_seconds
        again = [block for block, word in enumerate(rounds.saving) if word == RECOMPUTE]
        saving = list(rounds.saving)
        for block in sorted(again, key=lambda block: -seconds[assignment[block]][block] / freed[block]):
            if freed[block] <= room[assignment[block]]:
                room[assignment[block]] -= freed[block]
                saving[block] = KEEP
        return Rounds(problem, self._like.items, rounds.places, saving)

    def _judged(self, rounds: Rounds, cuts: Cuts) -> tuple[Solution, Judged]:
        problem, like = self._problem, self._like
        stages, saving = rounds.stages(cuts), rounds.saving
        assignment, root = problem.chain.assignment(stages, like.items)
        found = Solution((), assignment, root, False, stages, like.items, saving)
        judged = problem.judge(found)
        uses = self._held(judged.peaks) / np.maximum(1.0, self._budgets)
        key = tuple(float(entry) for entry in _KEYS[self._policy](uses, np.array(judged.seconds)))
        return replace(found, key=key), judged

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
