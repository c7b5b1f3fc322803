"""The folded order of a model with nested skips: what a skip joins lies on one device, so that the skip never moves.

A U-Net passes the output of its first block to its last one, that of the second to the last but one, and so on. Cut in
call order, almost every skip crosses to another device. Folded in the middle, blocks at both ends of a skip are one
unit of a chain; a device that holds consecutive units is visited on the way down and again on the way up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.transfers import Crossing
from autobalance.profiling.timeline import ROOT

Units = tuple[tuple[int, ...], ...]

# A residual at one end lets a cut of the folded chain move a few percent less; another search of it is not worth that.
_WORTHWHILE = 0.9


def folded_units(blocks: int, crossings: Sequence[Crossing]) -> Units | None:
    """The chain of a model folded along its skips, where its cuts move clearly fewer bytes than those in call order.

    Of the tensors that skip blocks, those count that lie inside one another; where they differ in bytes, the heaviest
    such nest is found by dynamic programming. Both ends of each are one unit, all other blocks are units by themselves.

    Example:
        >>> folded_units(5, [Crossing(0, (1, 4), 8, True), Crossing(1, (2, 3), 8, True), Crossing(3, (4,), 1, True)])
        ((0, 4), (1, 3), (2,))

    Args:
        blocks: how many there are, in call order.
        crossings: what passes between them.

    Returns:
        Units of block indices, from the ends of the model to its middle; None where folding does not help.
    """
    nest = _heaviest_nest(crossings)
    if not nest:
        return None
    units: list[tuple[int, ...]] = []
    for (above, below), (left, right) in pairwise([(-1, blocks), *nest]):
        # In turns, so that a cut between two skips leaves about as much of the way down as of the way up.
        down, up = range(above + 1, left), range(below - 1, right, -1)
        units += [(block,) for pair in zip_longest(down, up) for block in pair if block is not None]
        units.append((left, right))
    # The innermost part is left in call order: a cut there moves its tensors once, and would twice if it were folded.
    units += [(block,) for block in range(nest[-1][0] + 1, nest[-1][1])]
    unfolded = [(block,) for block in range(blocks)]
    before, after = (cut_bytes(order, crossings).mean() for order in (unfolded, units))
    return tuple(units) if after < _WORTHWHILE * before else None


def folded_chain(chain: Chain, crossings: Sequence[Crossing]) -> Chain | None:
    """A chain folded along the skips between its units; what stands beside it stays there.

    Example:
        >>> folded_chain(build_chain(profile, {}, None, free_pins=False), crossings_of(profile))

    Args:
        chain: in call order.
        crossings: what passes between blocks.

    Returns:
        The chain of the folded units; None where folding does not help, or joins units that are bound to different
        devices.
    """
    place = {owner: unit for unit, owners in enumerate(chain.units) for owner in owners}
    between = []
    for crossing in crossings:
        source = place.get(crossing.source)
        targets = [place[target] for target in crossing.targets if target in place]
        if source is not None and targets:
            between.append(replace(crossing, source=source, targets=tuple(targets)))
    order = folded_units(len(chain.units), between)
    if order is None:
        return None
    bound: dict[int, int] = {}
    for unit, joined in enumerate(order):
        devices = {chain.bound[member] for member in joined if member in chain.bound}
        if len(devices) > 1:
            return None
        if devices:
            bound[unit] = devices.pop()
    units = tuple(tuple(owner for member in joined for owner in chain.units[member]) for joined in order)
    return Chain(units, chain.items, bound)


def cut_bytes(units: Sequence[Sequence[int]], crossings: Sequence[Crossing]) -> NDArray[np.float64]:
    """Bytes that cross each single cut of a chain, gradients included.

    Example:
        >>> cut_bytes([(0,), (1,)], [Crossing(0, (1,), 10, True)])
        array([20.])

    Args:
        units: owners of each unit; the root is with the unit that holds the last block.
        crossings: of the step.

    Returns:
        One number for each place between two units; a single 0 where there is none.
    """
    place = {owner: unit for unit, owners in enumerate(units) for owner in owners}
    place.setdefault(ROOT, place[max(place)])
    changes = np.zeros(len(units) + 1)
    for crossing in crossings:
        ends = [place[owner] for owner in (crossing.source, *crossing.targets)]
        nbytes = crossing.nbytes * (1 + crossing.has_gradient)
        changes[min(ends)] += nbytes
        changes[max(ends)] -= nbytes
    return changes.cumsum()[: max(1, len(units) - 1)]


def _heaviest_nest(crossings: Sequence[Crossing]) -> list[tuple[int, int]]:
    """Of all skips the heaviest set in which each lies strictly inside the one before, outermost first."""
    weights: dict[tuple[int, int], int] = {}
    for crossing in crossings:
        first, last = crossing.source, max(crossing.targets)
        if 0 <= first < last - 1:
            weights[first, last] = weights.get((first, last), 0) + crossing.nbytes * (1 + crossing.has_gradient)
    if not weights:
        return []
    skips = sorted(weights)
    firsts, lasts = np.array(skips).T
    own = np.array([weights[skip] for skip in skips], dtype=np.int64)
    best, inner = own.copy(), np.full(len(skips), -1)
    for index in range(len(skips) - 1, -1, -1):
        inside = np.flatnonzero((firsts > firsts[index]) & (lasts < lasts[index]))
        if len(inside):
            inner[index] = inside[best[inside].argmax()]
            best[index] += best[inner[index]]
    at = int(best.argmax())
    nest = []
    while at >= 0:
        nest.append(skips[at])
        at = int(inner[at])
    return nest
