"""Optimizer state in host memory: what a stage's device holds less, and what that takes once per step.

Gradients go down to the host, the update runs there, and the new weights come up, as in ZeRO-Offload (Ren et al. 2021,
"ZeRO-Offload: Democratizing Billion-Scale Model Training").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autobalance.profiling.block_cost import BlockCost
from autobalance.units import pinned_bytes

HOST_BANDWIDTH = 204.8e9
"""Bytes per second of the host's memory: eight channels of DDR4-3200 (AMD EPYC 7742, the host of an A100 server)."""


@dataclass(frozen=True)
class HostOptimizer:
    """What it means for a stage that its optimizer state is on the host.

    Attributes:
        freed: bytes that leave the device.
        moved: bytes over the host link per step, both ways.
        seconds: per step, however many micro-batches it has; on top of the step time.
        pinned: pinned host memory, for gradients and weights on their way.
        held: host memory for the state itself, which need not be pinned.
    """

    freed: int
    moved: int
    seconds: float
    pinned: int
    held: int


def host_optimizer(
    blocks: Sequence[BlockCost], host_link: float, host_bandwidth: float = HOST_BANDWIDTH, sharing: int = 1
) -> HostOptimizer:
    """The price of keeping the optimizer state of some blocks on the host.

    Copies and update follow one another. An update reads gradients, weights and state and writes weights and state.

    Example:
        >>> host_optimizer(profile.blocks[:12], host_link=25e9).freed

    Args:
        blocks: rows of the stage.
        host_link: bytes per second to the host, one way.
        host_bandwidth: bytes per second of the host's memory.
        sharing: stages whose updates run on that memory at once.

    Raises:
        ValueError: a rate that is not above 0, or fewer than one stage.
    """
    if not (host_link > 0 and host_bandwidth > 0 and sharing >= 1):
        raise ValueError(
            f"host_link={host_link}, host_bandwidth={host_bandwidth} and sharing={sharing}: rates must be above 0, and "
            f"at least one stage shares them"
        )
    # Weights that are trained are as large as their gradients. Without state, blocks are updated where they are.
    gradients = sum(block.gradients for block in blocks if block.optimizer)
    state = sum(block.optimizer for block in blocks)
    moved = 2 * gradients
    traffic = gradients + 2 * (gradients + state)
    return HostOptimizer(
        freed=state,
        moved=moved,
        seconds=moved / host_link + traffic * sharing / host_bandwidth,
        pinned=sum(2 * pinned_bytes([block.gradients]) for block in blocks if block.optimizer),
        held=state,
    )


def sharing_of(micro_batches: int, devices: int) -> int:
    """Devices that are taken to update on the host's memory at once.

    The time of a step counts a stage's once-per-step seconds in part for each of its micro-batches. With one of them,
    stages follow one another and all count in full; with many, only those of the longest stage do, beside which the
    other devices update.

    Example:
        >>> sharing_of(micro_batches=16, devices=4)
        4

    Args:
        micro_batches: parts of the batch.
        devices: how many there are.
    """
    return max(1, min(micro_batches, devices))
