"""Seconds of the transfers into every stage, by its kind of device and the kind of the stage before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autobalance.devices.device import Device
from autobalance.devices.links import link_between
from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.shared_values import Matrix
from autobalance.partitioning.chains.stage_peaks import band
from autobalance.partitioning.transfers import Crossing, received
from autobalance.profiling.timeline import ROOT

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Arrivals:
    """What passes between the units of a chain, and between them and the items beside it.

    A stage that receives does not know where a tensor comes from, but for the stage before it: where tensors go
    further than that and links differ, the fastest link is taken, which is never too slow. What an item receives counts
    with the stage that sends it.

    Example:
        >>> Arrivals(chain, devices, crossings, training=True).tables(kinds, width=12)

    Attributes:
        chain: units and items.
        devices: of the question.
        crossings: tensors that go from block to block.
        training: whether gradients come back.
    """

    chain: Chain
    devices: tuple[Device, ...]
    crossings: tuple[Crossing, ...]
    training: bool

    def tables(self, kinds: Sequence[Kind], width: int) -> list[Seconds]:
        """`[before, k, d]` for each kind: seconds of what comes into the stage `[k, k + d + 1)`.

        The last row is for the first stage, and there is a single one where the kind before makes no difference.

        Args:
            kinds: of devices.
            width: units of the longest stage.
        """
        links = self._links(kinds)
        fastest = _fastest(links)
        before = _rows(links, fastest, passes_on_alone=self._passes_on_alone)
        between_units, with_root = (band(matrix, width, 0) for matrix in self._between_units)
        tables = []
        for at, kind in enumerate(kinds):
            seconds = between_units / before[:, at, None, None] + with_root / fastest[at]
            for other, there in enumerate(kinds):
                for item in there.items - kind.items:
                    # Both ways are as fast: a link is as fast as the slower of its ends.
                    seconds = seconds + band(self._with_items[item], width, 0) / links[other, at]
            tables.append(seconds)
        return tables

    def _links(self, kinds: Sequence[Kind]) -> Seconds:
        """Bytes per second between kinds; infinite within one of a single device."""
        links = np.full((len(kinds), len(kinds)), np.inf)
        for to, kind in enumerate(kinds):
            for at, other in enumerate(kinds):
                pair = next(((i, j) for i in other.devices for j in kind.devices if i != j), None)
                if pair is not None:
                    links[at, to] = link_between(self.devices[pair[0]], self.devices[pair[1]])
        return links

    @cached_property
    def _places(self) -> dict[int, int]:
        """Unit of each owner; of those in items nothing."""
        return {owner: unit for unit, owners in enumerate(self.chain.units) for owner in owners}

    @cached_property
    def _passes_on_alone(self) -> bool:
        """Whether every tensor of the chain goes from a unit to the next one and no further."""
        places = self._places
        return all(
            places[target] <= places[crossing.source] + 1
            for crossing in self._inside
            if not _has_root(crossing)
            for target in crossing.targets
        )

    @cached_property
    def _between_units(self) -> tuple[Matrix, Matrix]:
        """Bytes that come into every stage from other blocks of the chain, and between its root and blocks."""
        with_root = [crossing for crossing in self._inside if _has_root(crossing)]
        others = [crossing for crossing in self._inside if not _has_root(crossing)]
        return (
            received(others, self.chain.units, self.training),
            received(with_root, self.chain.units, self.training),
        )

    @cached_property
    def _inside(self) -> list[Crossing]:
        """Tensors that go from unit to unit."""
        return [
            replace(crossing, targets=targets)
            for crossing in self.crossings
            if crossing.source in self._places
            and (targets := tuple(target for target in crossing.targets if target in self._places))
        ]

    @cached_property
    def _with_items(self) -> list[Matrix]:
        """Bytes between every stage and each item, both ways, where they are on different devices."""
        return [self._with_item(item.owners) for item in self.chain.items]

    def _with_item(self, owners: Sequence[int]) -> Matrix:
        places, count = self._places, len(self.chain.units)
        given = [crossing for crossing in self.crossings if crossing.source in owners]
        moved = received(given, self.chain.units, self.training)
        sent = np.zeros(count + 1, dtype=np.int64)
        for crossing in self.crossings:
            if crossing.source in places and any(target in owners for target in crossing.targets):
                sent[places[crossing.source] + 1] += crossing.nbytes * (
                    2 if self.training and crossing.has_gradient else 1
                )
        before = np.cumsum(sent)
        between: Matrix = moved + np.maximum(before[None] - before[:, None], 0)
        return between


def _has_root(crossing: Crossing) -> bool:
    """Whether a tensor comes from the root or goes there, which is seldom the stage before."""
    return ROOT in (crossing.source, *crossing.targets)


def _fastest(links: Seconds) -> Seconds:
    """The fastest link into each kind; infinite where there is none."""
    fastest: Seconds = np.where(np.isfinite(links), links, 0.0).max(axis=0)
    fastest[fastest == 0] = np.inf
    return fastest


def _rows(links: Seconds, fastest: Seconds, *, passes_on_alone: bool) -> Seconds:
    """Links into each kind, by the kind before it; the last row is for the first stage."""
    finite = links[np.isfinite(links)]
    if not passes_on_alone or (finite == finite[:1]).all():
        return fastest[None]
    return np.vstack([links, fastest[None]]).astype(np.float64)
