"""Lower bounds of what a policy minimises, from the loosest to the tightest, and what they say about the blocks."""

from __future__ import annotations

import numpy as np

from autobalance.partitioning.chains.policies import fastest
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.plan import relative_use

# A block is worth splitting where its half would lower the bound by more than this share.
_WORTH = 0.05


def use_bounds(problem: Problem) -> dict[str, float]:
    """Lower bounds of the largest peak / budget: of all bytes together, and of the largest block.

    Example:
        >>> use_bounds(problem)
        {'area': 0.5, 'indivisible block': 0.62}

    Args:
        problem: a chain under budgets.
    """
    area = area_bound(problem)
    return {"area": area, "indivisible block": max(area, indivisible_bound(problem))}


def time_bounds(problem: Problem, within: float = np.inf) -> dict[str, float]:
    """Lower bounds of the step time in seconds: of all work together, of whole blocks, and with transfers.

    Example:
        >>> time_bounds(problem)
        {'area': 1.2, 'indivisible block': 1.31, 'transfers': 1.35}

    Args:
        problem: a chain.
        within: seconds of a step that are known to be possible.
    """
    least = least_seconds_of_blocks(problem)
    more, floor = problem.micro_batches - 1, problem.floor
    area = max(floor, float(least.sum()) + more * float(least.sum()) / len(problem.devices))
    found = {"area": area, "indivisible block": max(area, float(least.sum()) + more * float(least.max()))}
    for name, transfers in (("indivisible block", False), ("transfers", True)):
        free = problem.solve(fastest, memory=False, transfers=transfers, within=within)
        if free is not None and free.proved:
            found[name] = max(*found.values(), free.key[0])
    return found


def loop_bounds(problem: Problem) -> dict[str, float]:
    """Lower bounds of the step time in seconds that hold in whatever order stages visit devices.

    A device takes every micro-batch of a block one after the other. The first one comes when its forward is through all
    blocks before; the last one leaves with all their backwards still to come, while what the blocks behind take may
    fall between. Forwards alone leave with all blocks behind still to come.

    Example:
        >>> loop_bounds(problem)
        {'area': 1.2, 'indivisible block': 1.25}

    Args:
        problem: a chain under budgets.
    """
    least, count = least_seconds_of_blocks(problem), problem.micro_batches
    total = float(least.sum())
    area = max(problem.floor, total, count * total / len(problem.devices))
    around = np.cumsum(least) - least if problem.profile.training else total - least
    return {"area": area, "indivisible block": max(area, float((around + count * least).max()))}


def area_bound(problem: Problem) -> float:
    """No plan's largest use is below this: at its highest instant, the whole lies on all devices together.

    Example:
        >>> area_bound(problem)

    Args:
        problem: a chain under budgets.
    """
    return relative_use(problem.profile.peak(), sum(problem.budgets))


def indivisible_bound(problem: Problem) -> float:
    """No plan's largest use is below this: every unit and item lies whole on some device.

    Example:
        >>> indivisible_bound(problem)

    Args:
        problem: a chain under budgets.
    """
    budgets, chain = problem.budgets, problem.chain
    alone = problem.unit_peaks()
    bounds = [_least(int(alone[unit]), budgets, chain.bound.get(unit)) for unit in range(len(chain.units))]
    for index, item in enumerate(chain.items):
        bounds.append(_least(problem.item_peak(index), budgets, item.device))
    return max(bounds)


def least_seconds_of_blocks(problem: Problem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds that a micro-batch takes in every block on the device that is fastest with it.

    Example:
        >>> least_seconds_of_blocks(problem).sum()

    Args:
        problem: a chain under budgets.
    """
    return np.min(problem.block_seconds, axis=0)  # type: ignore[no-any-return]


def advice_on_time(problem: Problem, bounds: dict[str, float]) -> tuple[str, ...]:
    """Which block to split where a single one decides how long a step takes at least, and what that would gain.

    Example:
        >>> advice_on_time(problem, time_bounds(problem))
        ("splitting 'head', which takes 40% of a micro-batch by itself, in two would lower the bound by up to 12%",)

    Args:
        problem: a chain.
        bounds: of it, by name.
    """
    least, more = least_seconds_of_blocks(problem), problem.micro_batches - 1
    longest = int(least.argmax())
    whole = float(least.sum()) + more * float(least[longest])
    if not more or whole <= bounds["area"] * (1 + _WORTH):
        return ()
    halved = max(float(least[longest]) / 2, float(np.delete(least, longest).max(initial=0.0)))
    gain = 1 - max(bounds["area"], float(least.sum()) + more * halved) / whole
    if gain < _WORTH:
        return ()
    return (
        f"splitting {problem.profile.names[longest]!r}, which takes {float(least[longest] / least.sum()):.0%} of a "
        f"micro-batch by itself ({float(least[longest]):.3g} s), in two would gain up to {gain:.0%}",
    )


def advice_on_use(problem: Problem, bounds: dict[str, float]) -> tuple[str, ...]:
    """Which block to split where a single one decides how full a device gets at least, and what that would gain.

    Example:
        >>> advice_on_use(problem, use_bounds(problem))

    Args:
        problem: a chain.
        bounds: of it, by name.
    """
    if bounds["indivisible block"] <= bounds["area"] * (1 + _WORTH):
        return ()
    if not problem.chain.units:
        return ()  # every block stands beside the chain
    alone = problem.unit_peaks() / max(problem.budgets)
    largest = int(alone.argmax())
    others = np.delete(alone, largest)
    halved = max(float(alone[largest]) / 2, float(others.max(initial=0.0)), bounds["area"])
    gain = 1 - halved / bounds["indivisible block"]
    if gain < _WORTH or float(alone[largest]) < bounds["indivisible block"]:
        return ()
    owners = [owner for owner in problem.chain.units[largest] if owner >= 0]
    name = " with ".join(problem.profile.names[owner] for owner in owners)
    filled = f"{float(alone[largest]):.0%}"
    return (f"splitting {name!r}, which by itself fills {filled} of a device, in two would gain up to {gain:.0%}",)


def _least(peak: int, budgets: tuple[int, ...], device: int | None) -> float:
    return relative_use(peak, max(budgets) if device is None else budgets[device])
