"""Of the ways that take nearly the least time one that copies less to and from the host."""

from __future__ import annotations

from autobalance.partitioning.chains.policies import NEARLY, Cut
from autobalance.partitioning.chains.step_time import PRECISION, Fastest
from autobalance.partitioning.chains.sweep import Path
from autobalance.partitioning.savings.saving_tables import SavingTables

# Prices of a byte over the host link, in seconds that the bytes of the given way leave up to the limit, dearest first.
_PRICES = (256.0, 64.0, 16.0, 4.0, 1.0, 0.25)
_SEARCHES = 4


def copying_less(tables: SavingTables, found: Cut, micro_batches: int, host_memory: int) -> Cut:
    """A way within 2 % of the least step time that copies less than the given one, or that one.

    Ways are tried at several prices of a byte that is copied, for which the fastest is searched; what a stage copies is
    estimated until its choice is known, so that another one may copy still less.

    Example:
        >>> copying_less(tables, auto(tables, 8), 8, host_memory=2**38).path

    Args:
        tables: of the stages.
        found: by the policy `auto`, with true choices.
        micro_batches: parts of the batch.
        host_memory: bytes that all stages together may take.
    """
    seconds, use = found.key
    moved = tables.moved(found.path)
    limit = seconds * (1 + NEARLY) if tables.limit is None else tables.limit
    least = Fastest(tables, micro_batches).seconds_of(found.path)
    if not moved or use < 1:
        return found
    best, is_within = found, False
    for price in _PRICES:
        per_byte = price * max(limit - min(seconds, least), limit * PRECISION) / moved
        # What was an estimate in one search is known in the next.
        for _ in range(_SEARCHES):
            way = Fastest(tables.priced(per_byte), micro_batches).search()
            if way is None:
                return best
            is_new = tables.choose(way.path)
            if _is_within(tables, way.path, micro_batches, limit) and tables.pinned(way.path) <= host_memory:
                is_within = True
                if tables.moved(way.path) < tables.moved(best.path):
                    best = Cut(found.key, way.path)
            if not is_new:
                break
        if is_within:
            break
    return best


def _is_within(tables: SavingTables, path: Path, micro_batches: int, limit: float) -> bool:
    """Whether all stages have a way to fit, and take no longer than that together."""
    return Fastest(tables, micro_batches).seconds_of(path) <= limit
