"""Where the items beside a chain go when their places are too many to try: in turns, then as a whole, with a bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.orders.local_search import Cost, Places, improve, placement_moves
from autobalance.partitioning.orders.odd_graphs import SECONDS, OddGraph, crossings_between, place_parts
from autobalance.partitioning.orders.part_bytes import held_by_parts
from autobalance.partitioning.transfers import Crossing
from autobalance.profiling.timeline import ROOT, Timeline


@dataclass(frozen=True)
class Found:
    """Where the items go.

    Attributes:
        placement: device of every item.
        bound: no placement costs less than that in the first entry; None where it is not known.
    """

    placement: Places
    bound: float | None


@dataclass(frozen=True)
class ItemSearch:
    """A chain and the items beside it.

    Example:
        >>> search = ItemSearch(chain, profile.timeline, budgets, seconds, links, crossings, micro_batches=1)
        >>> search.best(cost, "largest use").placement

    Attributes:
        chain: units and items.
        timeline: storage events of one micro-batch.
        budgets: bytes per device.
        seconds: `[block, device]`: of a micro-batch, there and back, (blocks, devices).
        links: `[from, to]`: bytes per second between devices, (devices, devices).
        crossings: what passes between blocks.
        micro_batches: parts of the batch.
    """

    chain: Chain
    timeline: Timeline
    budgets: tuple[int, ...]
    seconds: NDArray[np.float64]
    links: NDArray[np.float64]
    crossings: tuple[Crossing, ...]
    micro_batches: int = 1

    def best(
        self,
        cost: Callable[[Places], Cost],
        objective: Literal["largest use", "step time"] | None,
        *,
        seconds: float = SECONDS,
    ) -> Found:
        """The best placement that is found.

        The items move and change places until that betters nothing. Mixed-integer programming then looks for a
        placement whose lower bound is below that; from what it finds, the items move again.

        Args:
            cost: of the best cut of the chain for a placement, compared entry by entry.
            objective: what its first entry is; None: something else, for which no bound is known.
            seconds: that the programme may take.
        """
        movable = [index for index, item in enumerate(self.chain.items) if item.device is None]
        turns = count()
        start = tuple(
            next(turns) % len(self.budgets) if item.device is None else item.device for item in self.chain.items
        )

        def bettered(start: Places) -> tuple[Places, Cost]:
            return improve(start, cost, lambda places: placement_moves(places, movable, len(self.budgets)))

        placement, least = bettered(start)
        if objective is None:
            return Found(placement, None)
        try:
            whole = place_parts(self._graph(), objective, cut_off=least[0], seconds=seconds)
        except ImportError as error:
            warnings.warn(f"{error}. Their devices are searched one by one, without a bound.", stacklevel=2)
            return Found(placement, None)
        if whole is None:
            return Found(placement, None)
        if whole.devices is not None:
            again, price = bettered(whole.devices[len(self.chain.units) :])
            if price < least:
                placement = again
        return Found(placement, whole.bound)

    def _graph(self) -> OddGraph:
        units = len(self.chain.units)
        parts = [*self.chain.units, *(item.owners for item in self.chain.items)]
        pins = {units + index: item.device for index, item in enumerate(self.chain.items) if item.device is not None}
        return OddGraph(
            held_by_parts(self.timeline, parts),
            self.budgets,
            tuple(range(units)),
            {**self.chain.bound, **pins},
            np.array([self._seconds_of(owners) for owners in parts]),
            crossings_between(self.crossings, parts),
            self.links,
            self.micro_batches,
            next((part for part, owners in enumerate(parts) if tuple(owners) == (ROOT,)), None),
        )

    def _seconds_of(self, owners: Sequence[int]) -> NDArray[np.float64]:
        blocks = [owner for owner in owners if owner != ROOT]
        return np.sum(self.seconds[blocks], axis=0)  # type: ignore[no-any-return]
