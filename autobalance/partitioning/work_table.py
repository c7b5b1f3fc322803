"""The work of many blocks side by side, from which their times on any device follow at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autobalance.devices.device import Device
from autobalance.devices.roofline import Work
from autobalance.profiling.block_cost import BlockCost

Seconds = NDArray[np.float64]


class WorkTable:
    """The work of a profile's blocks.

    Example:
        >>> forward, backward = WorkTable(profile.blocks).seconds(devices[0], devices)

    Args:
        blocks: rows of a profile.
    """

    def __init__(self, blocks: Sequence[BlockCost]) -> None:
        self.kinds = [block.kind for block in blocks]
        self.parts = [
            _Parts([block.forward_work for block in blocks]),
            _Parts([block.backward_work for block in blocks]),
        ]
        self.given = [
            np.array([block.forward_time for block in blocks], dtype=np.float64),
            np.array([block.backward_time for block in blocks], dtype=np.float64),
        ]
        self.by_hand = np.array([not block.forward_work and not block.backward_work for block in blocks], dtype=bool)

    def seconds(self, device: Device, devices: Sequence[Device]) -> tuple[Seconds, Seconds]:
        """Seconds of every block on a device, forward and backward.

        Example:
            >>> forward, backward = table.seconds(devices[0], devices)

        Args:
            device: that they run on.
            devices: all of the question, the fastest of which times given by hand hold for.
        """
        shares = dict(device.efficiency)
        efficiency = np.array([shares.get(kind, 1.0) for kind in self.kinds])
        slower = max((other.flops for other in devices), default=device.flops) / device.flops
        forward, backward = (
            np.where(self.by_hand, given * slower, parts.seconds(device, efficiency))
            for parts, given in zip(self.parts, self.given, strict=True)
        )
        return forward, backward


class _Parts:
    """Work of one direction as columns, one entry for each part of each block."""

    def __init__(self, work: Sequence[Sequence[Work]]) -> None:
        parts = [(row, part) for row, of_row in enumerate(work) for part in of_row]
        self.rows = len(work)
        self.row = np.array([row for row, _ in parts], dtype=np.int64)
        self.names = sorted({part.arithmetic for _, part in parts})
        codes = {name: code for code, name in enumerate(self.names)}
        self.arithmetic = np.array([codes[part.arithmetic] for _, part in parts], dtype=np.int64)
        self.flops = np.array([part.flops for _, part in parts], dtype=np.float64)
        self.traffic = np.array([part.traffic for _, part in parts], dtype=np.float64)
        self.launches = np.array([part.launches for _, part in parts], dtype=np.float64)

    def seconds(self, device: Device, efficiency: Seconds) -> Seconds:
        rates = np.array([device.rate(name) for name in self.names])
        computing = self.flops / (rates[self.arithmetic] * efficiency[self.row]) if len(rates) else self.flops
        on_device = np.bincount(self.row, np.maximum(computing, self.traffic / device.bandwidth), self.rows)
        on_host = np.bincount(self.row, self.launches * device.launch_time, self.rows)
        longest: Seconds = np.maximum(on_device, on_host)
        return longest
