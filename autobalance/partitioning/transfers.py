"""Which tensors cross from block to block, and the bytes that move under an assignment, or into every possible stage.

A trace has every block apart, so that each tensor which passes a door is copied there and its gradient is copied back:
all that any split could move is seen once. On one device those copies are one: a tensor crosses once for each device
that needs it, and gradients that meet on a device come back as one sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autobalance.partitioning.chains.shared_values import EVERYWHERE, NOWHERE, Matrix
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import HOST, ROOT, Timeline


@dataclass(frozen=True)
class Crossing:
    """A tensor that is made in one place and needed in others.

    Example:
        >>> Crossing(source=0, targets=(1, 7), nbytes=4096, has_gradient=True)

    Attributes:
        source: owner (block index or `ROOT`) of the tensor.
        targets: owners that need it, in the order in which they need it first.
        nbytes: bytes that move to a device on which one or more of the targets are.
        has_gradient: whether as many bytes come back in the backward.
    """

    source: int
    targets: tuple[int, ...]
    nbytes: int
    has_gradient: bool


def crossings_of(profile: Profile) -> tuple[Crossing, ...]:
    """All tensors that pass between blocks, or between a block and the root, in one step of one batch.

    What is copied again in the backward, such as the inputs of a checkpointed part, is a crossing of its own. Several
    views of one storage count as one tensor. A profile by hand passes the outputs of each row to the next one, and
    those of the last to the root.

    Example:
        >>> crossings_of(Profile.from_costs([4, 4], transfer=[2]))
        (Crossing(source=0, targets=(1,), nbytes=2, has_gradient=True),)

    Args:
        profile: with the copies of a traced step, or by hand.

    Returns:
        The crossings, in the order of their first copies.
    """
    timeline = profile.timeline
    copied = [value >= 0 for value in timeline.values]
    if not any(copied) and max(timeline.wholes, default=-1) < 0:
        return tuple(_from_rows(profile))
    return tuple(_from_copies(timeline, _bytes_of(profile)))


def bytes_moved(crossings: Sequence[Crossing], assignment: Sequence[int], root: int) -> dict[tuple[int, int], int]:
    """Bytes that one step moves, gradients included, by (device they leave, device they reach).

    Example:
        >>> bytes_moved([Crossing(0, (1, 2), 10, True)], assignment=[0, 1, 1], root=1)
        {(0, 1): 10, (1, 0): 10}

    Args:
        crossings: of the step.
        assignment: device per block.
        root: device of the root.

    Returns:
        Only pairs between which something moves; the sum of the values is the total.
    """
    moved: dict[tuple[int, int], int] = {}
    for crossing in crossings:
        here = _device(crossing.source, assignment, root)
        for there in {_device(target, assignment, root) for target in crossing.targets} - {here}:
            for pair in ((here, there), (there, here))[: 1 + crossing.has_gradient]:
                moved[pair] = moved.get(pair, 0) + crossing.nbytes
    return moved


def received(
    crossings: Sequence[Crossing], units: Sequence[Sequence[int]], training: bool, beside: Sequence[int] = ()
) -> Matrix:
    """Bytes that come into every stage `[i, j)` of a chain from other devices, and its inputs' gradients on their way.

    Each move is counted once, with the stage that receives; what goes to a root which is in no unit is counted with the
    stage that sends it.

    Example:
        >>> received([Crossing(0, (1,), 10, True)], units=[(0,), (1,)], training=True)[1, 2]
        20

    Args:
        crossings: of the step.
        units: owners of each unit of the chain.
        training: whether gradients come back.
        beside: owners that are in no unit and on the device of the stage, whichever stage that is; owners in neither
            are on another device.

    Returns:
        A matrix of `len(units) + 1` rows and columns; entry `[i, j]` with `i <= j` is about the stage `[i, j)`, in
        bytes. Entries below the diagonal mean nothing.
    """
    count = len(units)
    place = {owner: unit for unit, owners in enumerate(units) for owner in owners}
    place.update(dict.fromkeys(beside, EVERYWHERE))
    rectangles: list[tuple[int, int, int, int, int]] = []
    for crossing in crossings:
        nbytes = crossing.nbytes * (2 if training and crossing.has_gradient else 1)
        rectangles += ((*cells, nbytes) for cells in _receivers(crossing, place, count) if cells[0] < cells[1])
    differences = np.zeros((count + 2, count + 2), dtype=np.int64)
    if rectangles:
        top, bottom, left, right, nbytes_of = np.array(rectangles, dtype=np.int64).T
        for rows, columns, sign in ((top, left, 1), (bottom, right, 1), (top, right, -1), (bottom, left, -1)):
            np.add.at(differences, (rows, columns), sign * nbytes_of)
    entries: Matrix = differences.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
    return entries


# First row, one past the last row, first column, one past the last column of a matrix of stages.
_Cells = tuple[int, int, int, int]


def _receivers(crossing: Crossing, place: Mapping[int, int], count: int) -> Iterator[_Cells]:
    """The stages with which a crossing is counted."""
    source = place.get(crossing.source, NOWHERE)
    everywhere = 0, count + 1, 0, count + 1
    if ROOT in crossing.targets:
        root = place.get(ROOT, NOWHERE)
        if root == EVERYWHERE:
            return  # counted with the sender, and the blocks beside the root share its copy
        if root == NOWHERE and source == EVERYWHERE:
            yield everywhere
        elif root == NOWHERE and source >= 0:
            yield 0, source + 1, source + 1, count + 1
    if source == EVERYWHERE:
        return
    targets = sorted({place[target] for target in crossing.targets if place.get(target, NOWHERE) != NOWHERE})
    if targets[:1] == [EVERYWHERE]:
        if source == NOWHERE:
            yield everywhere
        else:  # all stages without the source: it comes before them, or after
            yield source + 1, count + 1, 0, count + 1
            yield 0, source + 1, 0, source + 1
        return
    before = -1
    for target in targets:
        # These stages begin after the target before and hold this one; they hold the source unless it lies outside.
        if source == NOWHERE:
            yield before + 1, target + 1, target + 1, count + 1
        else:
            yield max(before, source) + 1, target + 1, target + 1, count + 1
            if target < source:
                yield before + 1, target + 1, target + 1, source + 1
        before = target


def _device(owner: int, assignment: Sequence[int], root: int) -> int:
    return root if owner == ROOT else assignment[owner]


def _from_rows(profile: Profile) -> Iterator[Crossing]:
    last = len(profile.blocks) - 1
    if profile.blocks[0].inputs:
        yield Crossing(ROOT, (0,), profile.blocks[0].inputs, has_gradient=False)
    for index, block in enumerate(profile.blocks):
        if block.outputs:
            target = ROOT if index == last else index + 1
            yield Crossing(index, (target,), block.outputs, has_gradient=profile.training)


def _bytes_of(profile: Profile) -> Sequence[int]:
    """Bytes of every storage as a link sees them: not rounded, where that is known."""
    timeline = profile.timeline
    if timeline.per_sample and profile.batch_size:
        pairs = zip(timeline.fixed, timeline.per_sample, strict=True)
        return [fixed + each * profile.batch_size for fixed, each in pairs]
    return timeline.fixed if timeline.fixed and not timeline.per_sample else timeline.sizes


@dataclass(frozen=True)
class _Copy:
    """A copy at a door: its storage, and those which it can be a copy of, the original first."""

    storage: int
    sources: tuple[int, ...]


def _from_copies(timeline: Timeline, nbytes: Sequence[int]) -> Iterator[Crossing]:
    owners = timeline.owners
    forward, backward = _door_copies(timeline)
    returns: dict[tuple[int, int], list[_Copy]] = {}
    for copy in backward:
        returns.setdefault((owners[copy.storage], nbytes[copy.storage]), []).append(copy)
    # What a tensor was copied from is known by its gradient's way back; else it is the original.
    sources = {copy.storage: copy.sources[0] for copy in forward}
    trained: set[int] = set()
    for rank in range(max((len(copy.sources) for copy in forward), default=0)):
        for copy in forward:
            if copy.storage not in trained and rank < len(copy.sources):
                source = copy.sources[rank]
                waiting = returns.get((owners[source], nbytes[copy.storage]), [])
                back = next((gradient for gradient in waiting if _comes_from(gradient, copy, owners)), None)
                if back is not None:
                    waiting.remove(back)
                    sources[copy.storage] = source
                    trained.add(copy.storage)
    # A tensor is sent with its graph or without: the copies of each kind are shared among themselves.
    groups: dict[tuple[int, bool], list[int]] = {}
    for copy in forward:
        groups.setdefault((sources[copy.storage], copy.storage in trained), []).append(copy.storage)
    for copy in (copy for left in returns.values() for copy in left):
        groups.setdefault((copy.sources[0], False), []).append(copy.storage)
    births = timeline.lives[0]
    for (source, has_gradient), copies in sorted(groups.items(), key=lambda item: int(births[item[1]].min())):
        for shared in _shared(copies, timeline):
            targets = tuple(owners[copy] for copy in shared)
            yield Crossing(owners[source], targets, nbytes[shared[0]], has_gradient)


def _comes_from(gradient: _Copy, copy: _Copy, owners: Sequence[int]) -> bool:
    """Whether a copy in the backward can bring the gradient of a copy in the forward."""
    return any(owners[made] == owners[copy.storage] for made in gradient.sources)


def _door_copies(timeline: Timeline) -> tuple[list[_Copy], list[_Copy]]:
    """Copies between owners in the last step, those of its forward and those of its backward, in order."""
    births, deaths = timeline.lives
    (start, turn), stop = _last_step(timeline)
    groups: dict[int, list[int]] = {}
    values = np.array(timeline.values, dtype=np.int64)
    values[list(timeline.scratch)] = -1
    for storage in np.flatnonzero(values >= 0).tolist():
        groups.setdefault(timeline.values[storage], []).append(storage)
    found: list[_Copy] = []
    for members in groups.values():
        members.sort(key=births.__getitem__)
        for number, member in enumerate(members[1:], start=1):
            if start <= births[member] < stop and (not timeline.wholes or timeline.wholes[member] < 0):
                alive = tuple(other for other in members[:number] if deaths[other] > births[member])
                found.append(_Copy(member, alive))
    for part, whole in enumerate(timeline.wholes):
        if whole >= 0 and start <= births[part] < stop:
            found.append(_Copy(part, (whole,)))
    found = [copy for copy in found if _is_between_owners(copy, timeline.owners)]
    found.sort(key=lambda copy: int(births[copy.storage]))
    first_back = next((at for at, copy in enumerate(found) if births[copy.storage] >= turn), len(found))
    return found[:first_back], found[first_back:]


def _is_between_owners(copy: _Copy, owners: Sequence[int]) -> bool:
    here = owners[copy.storage]
    return here != HOST and any(owners[source] not in (here, HOST) for source in copy.sources[:1])


def _last_step(timeline: Timeline) -> tuple[tuple[int, int], int]:
    """Where its forward and its backward begin, and where that ends."""
    if not timeline.steps:
        return (0, len(timeline.events)), len(timeline.events)
    spans = timeline.spans(timeline.steps[-1], "forward+backward")
    stop = max(stop for _, stop in spans)
    return (spans[0][0], spans[1][0] if len(spans) > 1 else stop), stop


def _shared(copies: Sequence[int], timeline: Timeline) -> Iterator[list[int]]:
    """Copies of one tensor that are one where their owners share a device.

    A copy that nobody holds any more is made again, and so is one that an owner has been sent already: it was another
    view of the storage.
    """
    births, deaths = timeline.lives
    until, layers = -1, list[list[int]]()
    for copy in sorted(copies, key=births.__getitem__):
        if births[copy] >= until:
            yield from layers
            layers = []
        until = max(until, int(deaths[copy]))
        owner = timeline.owners[copy]
        fitting = (layer for layer in layers if all(timeline.owners[other] != owner for other in layer))
        layer = next(fitting, None)
        if layer is None:
            layers.append([copy])
        else:
            layer.append(copy)
    yield from layers
