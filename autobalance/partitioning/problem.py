"""One partitioning problem: a chain, a timeline and budgets; the search over where the items beside the chain go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from autobalance.partitioning.chain import Chain
from autobalance.partitioning.minmax import Cuts, Key, Uses
from autobalance.partitioning.policies import Policy, balanced
from autobalance.partitioning.stage_peaks import NOWHERE, Matrix, stage_peaks
from autobalance.profiling.timeline import Timeline
from autobalance.timelines.meeting import least

# Placements of the items that are tried one by one, and entries of all their matrices together (some seconds of work).
# Beyond either, the items improve one another in turn, without a proof.
MOST_COMBINATIONS = 4096
MOST_ENTRIES = 2 * 10**9


@dataclass(frozen=True)
class Solution:
    """A partition and its proof.

    Attributes:
        key: what the policy minimised.
        assignment: device per block.
        root: device of the root.
        proved: whether every placement of the items was tried.
    """

    key: Key
    assignment: tuple[int, ...]
    root: int
    proved: bool


@dataclass
class Problem:
    """A chain to cut under budgets.

    Example:
        >>> Problem(profile.timeline, chain, budgets=(11, 11), excess=(0, 0)).solve(balanced)

    Attributes:
        timeline: storage events.
        chain: units and items.
        budgets: bytes per device.
        excess: bytes by which each device, where it holds something, is known to stand above the replay.
    """

    timeline: Timeline
    chain: Chain
    budgets: tuple[int, ...]
    excess: tuple[int, ...]
    _peaks: dict[frozenset[int], Matrix] = field(default_factory=dict, repr=False)
    _uses: dict[tuple[int, frozenset[int], bool], Uses] = field(default_factory=dict, repr=False)

    def peaks(self, here: frozenset[int]) -> Matrix:
        """Peaks of all stages on whose device the items `here` are; lower bounds where gradients of one tensor meet.

        Example:
            >>> problem.peaks(frozenset())[0, 2]
        """
        if here not in self._peaks:
            bound, held_with_both = self._least
            places, both = self.chain.places(bound.owners, here), {}
            for storage, blocks in held_with_both.items():
                first, last = sorted(self.chain.places(blocks, here))
                places[storage] = NOWHERE if first == NOWHERE else last
                if first >= 0:
                    places[storage], both[storage] = NOWHERE, (first, last)
            self._peaks[here] = stage_peaks(bound, places, len(self.chain.units), both)
        return self._peaks[here]

    def bounds(self, assignment: Sequence[int], root: int) -> list[int]:
        """What the stages of an assignment take: its peaks, or less where gradients of one tensor meet.

        Example:
            >>> problem.bounds([0, 0, 1], root=1)
        """
        bound, held_with_both = self._least
        homes = bound.homes(assignment, root)
        for storage, (one, other) in held_with_both.items():
            homes[storage] = assignment[one] if assignment[one] == assignment[other] else -1
        return bound.peaks(homes, len(self.budgets))

    @cached_property
    def _least(self) -> tuple[Timeline, dict[int, tuple[int, int]]]:
        return least(self.timeline)

    def with_budgets(self, budgets: Sequence[int], excess: Sequence[int]) -> Problem:
        """The same problem under other budgets; peaks that are known are kept.

        Example:
            >>> problem.with_budgets((12, 12), (0, 0))
        """
        return Problem(self.timeline, self.chain, tuple(budgets), tuple(excess), _peaks=self._peaks)

    @property
    def is_exact(self) -> bool:
        """Whether all placements of the items can be tried, so that what `solve` finds, or does not, is proved."""
        combinations: int = len(self.budgets) ** len(self._movable)
        entries = combinations * len(self.budgets) * (len(self.chain.units) + 1) ** 2
        return combinations <= MOST_COMBINATIONS and entries <= MOST_ENTRIES

    @property
    def _movable(self) -> list[int]:
        return [index for index, item in enumerate(self.chain.items) if item.device is None]

    def solve(self, policy: Policy, *, hard: bool = True) -> Solution | None:
        """The best partition under a policy.

        Exact where all placements of the items can be tried; otherwise the items take turns, each moving to its best
        device, until none moves.

        Example:
            >>> problem.solve(balanced)

        Args:
            policy: what is best.
            hard: False lets devices go over their budgets.

        Returns:
            None where budgets leave no way, or where none was found and not all could be tried.
        """
        movable, proved = self._movable, self.is_exact
        best: tuple[Key, Cuts, tuple[int, ...]] | None = None
        for devices in self._all_placements(movable) if proved else self._descent(movable, policy, hard):
            found = self._cut(policy, devices, hard, best[0][0] if best is not None else np.inf)
            if found is not None and (best is None or found[0] < best[0]):
                best = (*found, devices)
        if best is None:
            return None
        key, cuts, devices = best
        assignment, root = self.chain.assignment(cuts, devices)
        return Solution(key, assignment, root, proved)

    def _all_placements(self, movable: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for chosen in product(range(len(self.budgets)), repeat=len(movable)):
            yield self._placement(dict(zip(movable, chosen, strict=True)))

    def _placement(self, chosen: dict[int, int]) -> tuple[int, ...]:
        return tuple(
            chosen[index] if item.device is None else item.device for index, item in enumerate(self.chain.items)
        )

    def _descent(self, movable: Sequence[int], policy: Policy, hard: bool) -> Iterator[tuple[int, ...]]:
        def cost(chosen: dict[int, int]) -> tuple[float, ...]:
            devices = self._placement(chosen)
            found = self._cut(policy, devices, hard)
            if found is not None:
                return found[0]
            # Over budget everywhere: the way back leads along the least largest use.
            loose = self._cut(balanced, devices, hard=False)
            return (float("inf"), *(loose[0] if loose is not None else ()))

        chosen = {index: order % len(self.budgets) for order, index in enumerate(movable)}
        least = cost(chosen)
        moved = True
        while moved:
            moved = False
            for index in movable:
                for device in range(len(self.budgets)):
                    trial = {**chosen, index: device}
                    if (price := cost(trial)) < least:
                        chosen, least, moved = trial, price, True
        yield self._placement(chosen)

    def _cut(
        self, policy: Policy, item_devices: tuple[int, ...], hard: bool, most: float = np.inf
    ) -> tuple[Key, Cuts] | None:
        here = [
            frozenset(index for index, place in enumerate(item_devices) if place == device)
            for device in range(len(self.budgets))
        ]
        held = [any(owner >= 0 for index in items for owner in self.chain.items[index].owners) for items in here]
        return policy([self._use(device, items, hard) for device, items in enumerate(here)], held, most)

    def _use(self, device: int, here: frozenset[int], hard: bool) -> Uses:
        if (device, here, hard) not in self._uses:
            self._uses[device, here, hard] = self._relative(device, here, hard)
        return self._uses[device, here, hard]

    def _relative(self, device: int, here: frozenset[int], hard: bool) -> Uses:
        peaks = self.peaks(here)
        bytes_held = np.where(peaks > 0, peaks + self.excess[device], 0)
        # A device without any budget may still stay empty; the divisor only has to keep the order.
        uses = bytes_held / float(max(1, self.budgets[device]))
        if hard:
            uses[bytes_held > self.budgets[device]] = np.inf
        uses[np.tril_indices(len(uses), -1)] = np.inf
        for unit, wanted in self.chain.bound.items():
            inside = np.zeros(uses.shape, dtype=bool)
            inside[: unit + 1, unit + 1 :] = True
            uses[~inside if wanted == device else inside] = np.inf
        return uses
