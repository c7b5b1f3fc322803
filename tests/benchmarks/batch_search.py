"""The largest batch that a split fits, or that any plan of a policy fits, by halving and by the replay alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import autobalance
from autobalance import InfeasiblePlanError, Plan, Profile

MOST = 2**16
"""Largest batch that is looked for."""
ProfileAt = Callable[[int], Profile]


def largest_of_split(
    profile_at: ProfileAt, assignment: Sequence[int], root: int, capacities: Sequence[int], fitting: int = 0
) -> int:
    """The largest batch that a split fits; 0 where it fits none.

    Args:
        profile_at: the profile at a batch.
        assignment: device per block.
        root: device of batch and outputs.
        capacities: bytes of every device.
        fitting: a batch that is known to fit.
    """

    def fits(batch: int) -> bool:
        return autobalance.score(profile_at(batch), assignment, list(capacities), root=root).fits

    low, high = fitting, max(1, 2 * fitting)
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_of_plans(profile_at: ProfileAt, plan_at: Callable[[int], Plan | None], capacities: Sequence[int]) -> int:
    """The largest batch for which there is a plan: that of one plan's split, then of a plan for one sample more.

    Args:
        profile_at: the profile at a batch.
        plan_at: the plan for a batch, None where it is not wanted.
        capacities: bytes of every device.
    """
    best = 0
    while best < MOST:
        try:
            plan = plan_at(best + 1)
        except InfeasiblePlanError:
            break
        if plan is None:
            break
        best = largest_of_split(profile_at, plan.assignment, plan.root, capacities, fitting=best + 1)
    return best
