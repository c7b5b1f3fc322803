"""What the bytes of every device are for."""

from __future__ import annotations

from dataclasses import dataclass

from autobalance.partitioning.plan import Plan
from autobalance.profiling.block_cost import BlockCost
from autobalance.report.words import visits_of

PARTS = ("weights", "gradients", "optimizer", "saved", "rest")
"""What a device's peak is made of, in the order in which pictures stack it."""


@dataclass(frozen=True)
class Shares:
    """Bytes of one device by what they are for, each at its most.

    They are not all alive at one instant: gradients come while saved tensors go.

    Attributes:
        weights: parameters and buffers of its blocks.
        gradients: of its blocks.
        optimizer: state of the optimizer, where it is not kept on the host.
        saved: what its blocks keep from forward to backward, for all micro-batches in flight.
        peak: most bytes at once.
        in_flight: micro-batches that each of its stages holds at once.
        forward, backward, receive: seconds of a micro-batch in all of its stages.
    """

    weights: int
    gradients: int
    optimizer: int
    saved: int
    peak: int
    in_flight: tuple[int, ...]
    forward: float
    backward: float
    receive: float

    @property
    def time(self) -> float:
        """Seconds of a micro-batch in all of its stages."""
        return self.forward + self.backward + self.receive

    @property
    def stack(self) -> tuple[int, ...]:
        """Bytes of each of `PARTS` that add up to the peak.

        Where the parts are more than the peak together, each takes what those before it leave; the rest is what no
        part accounts for: batch, loss, what is alive inside one block or one step of the optimizer.
        """
        parts = []
        left = self.peak
        for part in (self.weights, self.gradients, self.optimizer, self.saved):
            parts.append(min(part, left))
            left -= parts[-1]
        return (*parts, left)


def shares_of(plan: Plan) -> tuple[Shares, ...]:
    """The shares of every device of a plan.

    Example:
        >>> shares_of(plan)[0].saved

    Args:
        plan: the plan.
    """
    kept = kept_bytes(plan)
    stages = visits_of(plan)
    found = []
    for index, peak in enumerate(plan.peaks):
        rows = [(block, plan.blocks[block]) for block in plan.blocks_on(index)]
        here = [stage for stage in stages if stage.device == index]
        held = index not in plan.host_optimizer
        in_flight = {block: stage.in_flight for stage in stages for block in stage.blocks}
        found.append(
            Shares(
                weights=sum(row.weights + row.buffers for block, row in rows if block not in plan.streamed),
                gradients=sum(row.gradients for block, row in rows if block not in plan.streamed),
                optimizer=sum(row.optimizer for _, row in rows) if held else 0,
                saved=sum(kept[block] * in_flight.get(block, 1) for block, _ in rows),
                peak=peak,
                in_flight=tuple(stage.in_flight for stage in here),
                forward=sum(stage.forward_time for stage in here),
                backward=sum(stage.backward_time for stage in here),
                receive=sum(stage.receive_time for stage in here),
            )
        )
    return tuple(found)


def kept_bytes(plan: Plan) -> list[int]:
    """Bytes that each block keeps on its device from forward to backward, for one micro-batch.

    Example:
        >>> kept_bytes(plan)

    Args:
        plan: to be shown.
    """
    saving = plan.saving or ("keep",) * len(plan.blocks)
    return [_kept(row, what) for row, what in zip(plan.blocks, saving, strict=True)]


def _kept(row: BlockCost, what: str) -> int:
    if what == "recompute":
        return min(row.inputs, row.saved)
    return row.saved if what == "keep" else 0
