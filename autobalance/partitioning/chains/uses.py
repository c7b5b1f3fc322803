"""What devices use, peak over budget, under the ways to cut a chain: what policies compare."""

from __future__ import annotations

import numpy as np

from autobalance.partitioning.chains.step_time import PRECISION
from autobalance.partitioning.chains.sweep import CostOf, Costs, Path, Sweep
from autobalance.partitioning.chains.tables import Tables


def uses_of(tables: Tables) -> CostOf:
    """Uses of stages by their length, as a sweep takes them.

    Args:
        tables: what stages hold and take.
    """
    return lambda kind, left: tables.use_by_length(kind, left)[:, None]


def bases_are_allowed(tables: Tables) -> bool:
    """Whether devices without a stage keep their budgets.

    Args:
        tables: what stages hold and take.
    """
    return bool(np.isfinite(largest_base(tables)))


def largest_base(tables: Tables) -> float:
    """The largest use of a device without a stage.

    Args:
        tables: what stages hold and take.
    """
    return max(tables.base(kind) for kind in range(len(tables.kinds)))


def largest_use(tables: Tables, path: Path) -> float:
    """The largest use of all devices.

    Args:
        tables: what stages hold and take.
        path: the stages.
    """
    uses = [
        float(tables.use(kind, len(path) - number)[start, stop - start - 1])
        for number, (kind, start, stop) in enumerate(path)
    ]
    return max([*uses, largest_base(tables)])


def least_use_of_short_stages(tables: Tables, micro_batches: int, limit: float) -> float:
    """No way within a step time has a smaller largest use: none of its stages takes the whole time by itself.

    Args:
        tables: what stages hold and take.
        micro_batches: parts of the batch.
        limit: seconds of the step.
    """
    most = limit * (1 + PRECISION) / micro_batches

    def cost(kind: int, left: int) -> Costs:
        time = tables.time_by_length(kind, left)
        return np.where(time <= most, tables.use_by_length(kind, left)[:, None], np.inf)

    return max(Sweep(tables.counts, tables.units, cost, "max").value, largest_base(tables))


def uses_between(tables: Tables, low: float, high: float, kinds: tuple[int, ...] | None = None) -> Costs:
    """The different uses that stages have between two others, sorted.

    Args:
        tables: what stages hold and take.
        low, high: neither is among them.
        kinds: of devices whose stages count; None: all.
    """
    wanted = range(len(tables.kinds)) if kinds is None else kinds
    seen: dict[tuple[int, int], Costs] = {}
    for kind in wanted:
        for left in range(1, min(sum(tables.counts), tables.units) + 1):
            key = kind, tables.in_flight(left)
            if key not in seen:
                uses = tables.use(kind, left)
                seen[key] = uses[np.isfinite(uses) & (uses > low) & (uses < high)]
    return np.unique(np.concatenate([*seen.values(), np.empty(0)]))
