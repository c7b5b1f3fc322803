"""A partition of a chain, as the search finds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.sweep import Path


@dataclass(frozen=True)
class Solution:
    """A partition and its proof.

    Attributes:
        key: what the policy minimised.
        assignment: device per block.
        root: device of the root.
        proved: whether no other way of this kind is better.
        stages: (device, first unit, one past the last) of the stages of the chain.
        items: device of each item.
        saving: "keep", "recompute" or "offload" for each block; empty: all keep.
        streamed: blocks whose weights stream from the host.
        host_optimizer: devices whose optimizer state is on the host.
        pinned: bytes of host memory that all of that takes.
        bound: nothing has a smaller first entry of the key; None where that is not known.
    """

    key: tuple[float, ...]
    assignment: tuple[int, ...]
    root: int
    proved: bool
    stages: tuple[tuple[int, int, int], ...] = ()
    items: tuple[int, ...] = ()
    saving: tuple[str, ...] = ()
    streamed: tuple[int, ...] = ()
    host_optimizer: tuple[int, ...] = ()
    pinned: int = 0
    bound: float | None = None

    @property
    def saves_on(self) -> frozenset[int]:
        """Devices on which blocks save memory."""
        saves = [self.assignment[block] for block, word in enumerate(self.saving) if word != "keep"]
        return frozenset([*saves, *(self.assignment[block] for block in self.streamed), *self.host_optimizer])


def on_devices(path: Path, kinds: Sequence[Kind]) -> tuple[tuple[int, int, int], ...]:
    """Stages of a way on devices: those of one kind in order.

    Example:
        >>> on_devices(sweep.path, kinds)
        ((0, 0, 4), (1, 4, 9))

    Args:
        path: (kind, first unit, one past the last) of each stage.
        kinds: of devices.
    """
    free = [list(kind.devices) for kind in kinds]
    return tuple((free[kind].pop(0), start, stop) for kind, start, stop in path)
