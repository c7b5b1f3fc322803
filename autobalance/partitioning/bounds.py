"""Lower bounds of the largest relative use, from the loosest to the tightest."""

from __future__ import annotations

from autobalance.partitioning.plan import relative_use
from autobalance.partitioning.problem import Problem
from autobalance.profiling.profile import Profile


def area_bound(profile: Profile, budgets: tuple[int, ...]) -> float:
    """No plan's largest use is below this: at its highest instant, the whole lies on all devices together.

    Example:
        >>> area_bound(profile, (8, 8))
    """
    return relative_use(profile.peak(), sum(budgets))


def indivisible_bound(problem: Problem) -> float:
    """No plan's largest use is below this: every unit and item lies whole on some device.

    Example:
        >>> indivisible_bound(problem)
    """
    budgets, chain = problem.budgets, problem.chain
    alone = problem.peaks(frozenset())
    bounds = [_least(int(alone[unit, unit + 1]), budgets, chain.bound.get(unit)) for unit in range(len(chain.units))]
    for index, item in enumerate(chain.items):
        bounds.append(_least(int(problem.peaks(frozenset({index}))[0, 0]), budgets, item.device))
    return max(bounds)


def _least(peak: int, budgets: tuple[int, ...], device: int | None) -> float:
    return relative_use(peak, max(budgets) if device is None else budgets[device])
