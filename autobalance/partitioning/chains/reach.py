"""Which stages a search has to look at: those that a better plan could have.

What a stage holds and how long it takes at least grows with its length, so that a limit of either cuts rows of stages
short. Limits are guessed, verified by what the search finds, and widened where that is not enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.policies import NEARLY, Cut, Policy, auto, balanced, fastest
from autobalance.partitioning.chains.stage_peaks import Reach
from autobalance.partitioning.chains.tables import InFlight
from autobalance.profiling.timeline import HOST, Timeline

# Chains up to this length are searched whole: there is not enough to spare.
_SHORT = 128
_HALVINGS = 10


@dataclass(frozen=True)
class Growth:
    """What every unit adds at least to the stages that hold it.

    Attributes:
        held: bytes at each of several instants, `[instant][unit]`.
        seconds: for one micro-batch on the fastest device.
    """

    held: NDArray[np.int64]
    seconds: NDArray[np.float64]

    @property
    def is_short(self) -> bool:
        """Whether all stages of the chain can be looked at."""
        return len(self.seconds) <= _SHORT

    def reach(self, most_bytes: float = np.inf, most_seconds: float = np.inf) -> Reach:
        """The stages that hold and take no more than that.

        Example:
            >>> growth.reach(most_bytes=80 * 2**30).width

        Args:
            most_bytes: limit of what a stage holds at the least.
            most_seconds: limit of what it takes at the least.
        """
        units = len(self.seconds)
        last = np.full(units, units, dtype=np.int64)
        for column, most in [
            *((held.astype(np.float64), most_bytes) for held in self.held),
            (self.seconds, most_seconds),
        ]:
            if np.isfinite(most):
                sums = np.concatenate([[0.0], np.cumsum(column)])
                # Rounding of sums must not lose a stage that is just within the limit.
                last = np.minimum(last, np.searchsorted(sums, sums[:-1] + most * (1 + 1e-9), side="right") - 1)
        return Reach.of(np.maximum(last, np.arange(units) + 1).tolist())

    def even_use(self, budgets: Sequence[int], in_flight: InFlight) -> float:
        """About the smallest largest use, where devices are filled from the end of the chain in their order.

        Example:
            >>> growth.even_use([80 * 2**30] * 8, in_flight=lambda left: min(32, left))

        Args:
            budgets: bytes per device.
            in_flight: micro-batches, by the number of stages to the end.
        """
        static = np.concatenate([[0], np.cumsum(self.held[0])])
        kept = np.concatenate([[0], np.cumsum(self.held.max(axis=0) - self.held[0])])
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            stop = len(self.seconds)
            for left, budget in enumerate(reversed(budgets), start=1):
                held = static + in_flight(left) * kept
                stop = int(np.searchsorted(held[: stop + 1], held[stop] - middle * budget))
            low, high = (middle, high) if stop else (low, middle)
        return high


def growth_of(
    timeline: Timeline,
    chain: Chain,
    seconds: Sequence[NDArray[np.float64]],
    before: Sequence[str] = ("forward", "backward"),
) -> Growth:
    """What every unit adds, from instants at which nothing is shared between units.

    Example:
        >>> growth_of(profile.timeline, chain, seconds=[times]).reach(most_bytes=2**30)

    Args:
        timeline: storage events of a micro-batch.
        chain: its units.
        seconds: per kind of device, of each unit.
        before: phases, before which what is held cannot be saved.
    """
    place = {owner: unit for unit, owners in enumerate(chain.units) for owner in owners}
    of = np.array([place.get(owner, -1) if owner != HOST else -1 for owner in timeline.owners], dtype=np.int64)
    own = (np.array(timeline.values, dtype=np.int64) < 0) & (of >= 0)
    if timeline.wholes:
        own &= np.array(timeline.wholes, dtype=np.int64) < 0
    storages, born = timeline.event_columns
    changes = np.where(born, 1, -1)
    sizes = np.array(timeline.sizes, dtype=np.int64)
    instants = [position for name, position in timeline.marks if name.endswith(tuple(before))]
    held = np.zeros((len(instants), len(chain.units)), dtype=np.int64)
    for row, instant in zip(held, instants, strict=True):
        # A storage that lives several times is not there in between.
        alive = own & (np.bincount(storages[:instant], changes[:instant], len(own)) > 0)
        np.add.at(row, of[alive], sizes[alive])
    return Growth(held, np.min(np.array(seconds), axis=0))


Limits = tuple[float, float]
"""Of the bytes that a stage holds at the least, and of the seconds that it takes."""
# How far above the least possible the first guess lies.
_GUESS = 1.05
_WIDER = 1.5


def first_limits(
    policy: Policy, growth: Growth, budgets: Sequence[int], micro_batches: int, in_flight: InFlight, *, memory: bool
) -> Limits:
    """A guess of what no stage of a good plan exceeds.

    Example:
        >>> first_limits(balanced, growth, budgets, micro_batches=1, in_flight=lambda left: 1, memory=True)

    Args:
        policy: that is searched.
        growth: of the chain.
        budgets: of the devices.
        micro_batches: parts of the batch.
        in_flight: of these, by the number of stages to the end.
        memory: whether budgets matter.
    """
    budget = float(max(budgets)) if memory else np.inf
    if policy is balanced and memory and len(growth.held):
        return min(1.0, _GUESS * growth.even_use(budgets, in_flight)) * budget, np.inf
    if policy in (auto, fastest) and micro_batches > 1:
        least = max(growth.seconds.sum() / len(budgets), growth.seconds.max())
        return budget, _GUESS * least
    return budget, np.inf


def limits_of(
    policy: Policy, growth: Growth, found: Cut | None, budget: float, micro_batches: int, floor: float
) -> Limits:
    """What no stage of a plan as good as the one found exceeds.

    Example:
        >>> limits_of(balanced, growth, balanced(tables), budget=80 * 2**30, micro_batches=1, floor=0.0)

    Args:
        policy: that was searched.
        growth: of the chain.
        found: what was found; None: nothing.
        budget: the largest of the devices.
        micro_batches: parts of the batch.
        floor: seconds that a step takes at least.
    """
    if found is None:
        return budget, np.inf
    if policy is balanced:
        return min(1.0, found.key[0]) * budget, np.inf
    if policy in (auto, fastest) and micro_batches > 1:
        most = max(found.key[0], floor) * (1 + NEARLY)
        return budget, (most - float(growth.seconds.sum())) / (micro_batches - 1)
    return budget, np.inf


def widened(limits: Limits, needed: Limits, *, is_found: bool) -> Limits:
    """The next limits to search with, where a search within some did not prove enough.

    Example:
        >>> widened((10.0, 2.0), needed=(12.0, 1.0), is_found=True)
        (12.0, 2.0)

    Args:
        limits: that were searched with.
        needed: that would be enough for certain.
        is_found: whether anything was found; then the needed ones are not far.
    """
    if is_found:
        return max(limits[0], needed[0]), max(limits[1], needed[1])
    return min(limits[0] * _WIDER, needed[0]), min(limits[1] * _WIDER, needed[1])
