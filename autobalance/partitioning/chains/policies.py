"""What a good plan is, policy by policy. Each is exact: it returns the best way to cut a chain in its own sense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autobalance.partitioning.chains.step_time import Fastest, Timed
from autobalance.partitioning.chains.sweep import Costs, Path, Sweep
from autobalance.partitioning.chains.tables import Tables
from autobalance.partitioning.chains.uses import (
    bases_are_allowed,
    largest_base,
    largest_use,
    least_use_of_short_stages,
    uses_between,
    uses_of,
)

NEARLY = 0.02
"""Share of the least step time within which `auto` prefers the smaller use."""

# Uses that are told apart to the last; among more of them, those within this share of one another count as equal.
_MANY = 4096
_ALIKE = 1e-3


@dataclass(frozen=True)
class Cut:
    """A way to cut the chain.

    Attributes:
        key: what was minimised, the more important first.
        path: its stages.
    """

    key: tuple[float, ...]
    path: Path


Policy = Callable[[Tables, int], "Cut | None"]
"""From the tables and the number of micro-batches to the best way; None where there is none."""


def auto(tables: Tables, micro_batches: int) -> Cut | None:
    """The least step time; of the ways within 2 % of it, the one with the smallest largest use.

    Example:
        >>> auto(tables, micro_batches=8)

    Args:
        tables: what stages hold and take.
        micro_batches: parts of the batch.
    """
    if not bases_are_allowed(tables):
        return None
    best = _fastest(tables, micro_batches)
    if best is None:
        return None
    seconds = max(best.seconds, tables.floor)
    limit = seconds * (1 + NEARLY) if tables.limit is None else tables.limit
    least = least_use_of_short_stages(tables, micro_batches, limit)
    use, path = largest_use(tables, best.path), best.path

    def lighter(most: float) -> Path | None:
        return Fastest(tables, micro_batches, most).within(limit, best.least_sum)

    if use > least and (found := lighter(least)) is not None:
        use, path = largest_use(tables, found), found
    elif use > least:
        values = uses_between(tables, least, use)
        low, high = 0, len(values)
        while low < high and (high <= _MANY or use > float(values[low]) * (1 + _ALIKE)):
            middle = (low + high) // 2
            found = lighter(float(values[middle]))
            if found is None:
                low = middle + 1
            else:
                use, path = largest_use(tables, found), found
                high = int(np.searchsorted(values, use))
    # Of the ways with that use the evenest, if it is one of those that take no longer.
    even = _evenest(tables, use, ())
    if even is not None and Fastest(tables, micro_batches, use).seconds_of(even.path) <= limit:
        path = even.path
    return Cut((seconds, use), path)


def _fastest(tables: Tables, micro_batches: int) -> Timed | None:
    """The least step time of some tables, which remember it."""
    if micro_batches not in tables.fastest:
        tables.fastest[micro_batches] = Fastest(tables, micro_batches).search()
    return tables.fastest[micro_batches]


def fastest(tables: Tables, micro_batches: int) -> Cut | None:
    """The least step time.

    Example:
        >>> fastest(tables, micro_batches=8)

    Args:
        tables, micro_batches: as for `auto`.
    """
    found = _fastest(tables, micro_batches) if bases_are_allowed(tables) else None
    return None if found is None else Cut((max(found.seconds, tables.floor),), found.path)


def balanced(tables: Tables, micro_batches: int = 1) -> Cut | None:
    """The smallest largest use; of equal ones, the smallest sum of squares, which leaves no device empty for nothing.

    Example:
        >>> balanced(tables)

    Args:
        tables, micro_batches: as for `auto`.
    """
    if not bases_are_allowed(tables):
        return None
    largest = max(Sweep(tables.counts, tables.units, uses_of(tables), "max").value, largest_base(tables))
    return _evenest(tables, largest, (largest,))


def balanced_low_0(tables: Tables, micro_batches: int = 1) -> Cut | None:
    """Device 0 holds as little as the others allow; they are balanced.

    Example:
        >>> balanced_low_0(tables)

    Args:
        tables, micro_batches: as for `auto`.
    """
    if not bases_are_allowed(tables):
        return None
    first = next(kind for kind, here in enumerate(tables.kinds) if 0 in here.devices)
    least = _least_on(tables, first)
    if least is None:
        return None

    def cost(kind: int, left: int) -> Costs:
        uses = tables.use_by_length(kind, left)[:, None]
        return uses if kind != first else np.where(uses <= least, 0.0, np.inf)

    sweep = Sweep(tables.counts, tables.units, cost, "max")
    others = [tables.base(kind) for kind in range(len(tables.kinds)) if kind != first]
    largest = max([sweep.value, *others])
    return _evenest(tables, largest, (least, largest), {first: least})


def sequential(tables: Tables, micro_batches: int = 1) -> Cut | None:
    """Devices are filled in the given order, and as few as possible are used.

    Example:
        >>> sequential(tables)

    Args:
        tables, micro_batches: as for `auto`.
    """
    if not bases_are_allowed(tables):
        return None
    kind_of = {device: kind for kind, here in enumerate(tables.kinds) for device in here.devices}
    order = [kind_of[device] for device in sorted(kind_of)]
    units = tables.units
    # fresh[s][d, k]: fewest devices without items that the units from k on need in s stages on devices from d on.
    fresh = [np.full((len(order) + 1, units + 1), np.inf)]
    fresh[0][:, units] = 0.0
    for left in range(1, min(len(order), units) + 1):
        now = np.full((len(order) + 1, units + 1), np.inf)
        for device in reversed(range(len(order))):
            now[device] = now[device + 1]
            for unit in range(units):
                _, needs = _ends(tables, order, left, device, unit, fresh[-1])
                now[device, unit] = min(now[device, unit], needs.min(initial=np.inf))
        fresh.append(now)
    stages = min(range(len(fresh)), key=lambda left: fresh[left][0, 0])
    if not np.isfinite(fresh[stages][0, 0]):
        return None
    path, unit, device, left = list[tuple[int, int, int]](), 0, 0, stages
    while left:
        stops, needs = _ends(tables, order, left, device, unit, fresh[left - 1])
        best = np.flatnonzero(needs == fresh[left][device, unit])
        if best.size:
            path.append((order[device], unit, int(stops[best[-1]])))
            unit, left = int(stops[best[-1]]), left - 1
        device += 1
    devices = fresh[stages][0, 0] + sum(len(kind.devices) for kind in tables.kinds if kind.items)
    return Cut((float(devices), *(float(start - stop) for _, start, stop in path)), tuple(path))


def _ends(
    tables: Tables, order: Sequence[int], left: int, device: int, unit: int, rest: Costs
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Costs]:
    """Where a stage may end that begins with a unit on a device, and the devices that it and the rest then need."""
    kind = order[device]
    stops = np.flatnonzero(np.isfinite(tables.use(kind, left)[unit])) + unit + 1
    return stops, rest[device + 1, stops] + (0 if tables.kinds[kind].items else 1)


def _evenest(
    tables: Tables, largest: float, key: tuple[float, ...], limits: dict[int, float] | None = None
) -> Cut | None:
    """Of the ways whose uses keep a limit, the one with the least sum of squared uses."""
    if not np.isfinite(largest):
        return None
    limits_of_kinds = limits or {}

    def cost(kind: int, left: int) -> Costs:
        uses = tables.use_by_length(kind, left)
        longest = np.flatnonzero((uses <= limits_of_kinds.get(kind, largest)).any(axis=1))
        uses = uses[: int(longest[-1]) + 1 if len(longest) else 1, None]
        squares = uses**2 - tables.base(kind) ** 2
        return np.where(uses <= limits_of_kinds.get(kind, largest), squares, np.inf)

    sweep = Sweep(tables.counts, tables.units, cost, "sum")
    return Cut((*key, sweep.value), sweep.path) if np.isfinite(sweep.value) else None


def _least_on(tables: Tables, first: int) -> float | None:
    """The least use of one kind with which the others can hold the rest; its empty use where they hold all."""

    def rest(limit: float) -> Sweep:
        def cost(kind: int, left: int) -> Costs:
            uses = tables.use_by_length(kind, left)[:, None]
            return uses if kind != first else np.where(np.isfinite(uses) & (uses <= limit), 0.0, np.inf)

        return Sweep(tables.counts, tables.units, cost, "max")

    widest = rest(np.inf)
    if not np.isfinite(widest.value):
        return None
    if np.isfinite(widest.least_without(first)):
        return tables.base(first)
    values = uses_between(tables, -np.inf, np.inf, (first,))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if np.isfinite(rest(float(values[middle])).value) else (middle + 1, high)
    return float(values[high])


POLICIES: dict[str, Policy] = {
    "auto": auto,
    "balanced": balanced,
    "balanced_low_0": balanced_low_0,
    "sequential": sequential,
}
# The other name is the one that users of transformers know.
_ALSO = {"minimize_first_gpu_memory": "balanced_low_0"}


def policy_name(word: str) -> str:
    """The policy that a word stands for.

    Example:
        >>> policy_name("minimize_first_gpu_memory")
        'balanced_low_0'

    Args:
        word: as the user says it.

    Raises:
        ValueError: there is no such policy.
    """
    name = _ALSO.get(word, word) if isinstance(word, str) else ""
    if name not in POLICIES:
        raise ValueError(f"policy={word!r} does not exist; choose one of {', '.join([*POLICIES, *_ALSO])}")
    return name
