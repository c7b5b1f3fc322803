"""What the blocks of a stage do to fit, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autobalance.partitioning.savings.savings import SavingCosts, stage_peak

MILLIONTH = 1e-6
"""Share by which times may differ that are the same."""


@dataclass(frozen=True)
class Choice:
    """What the blocks of a stage do to fit, and what it takes.

    Attributes:
        seconds: of the stage, per micro-batch.
        saving: "keep", "recompute" or "offload" of each of its blocks.
        streamed: blocks whose weights stream, as indices in the chain.
        peak: bytes on the device in the textbook's step.
        carried: bytes over the host link per micro-batch.
        pinned: bytes of pinned host memory.
        bound: seconds below which no way is; `seconds` itself where all ways were tried.
        once: seconds per step of an optimizer on the host, whose share `seconds` has; 0: it is on the device.
    """

    seconds: float
    saving: tuple[str, ...]
    streamed: tuple[int, ...]
    peak: int
    carried: int
    pinned: int
    bound: float
    once: float = 0.0

    @property
    def proved(self) -> bool:
        """Whether no way is faster by more than a millionth."""
        return self.seconds <= self.bound * (1 + MILLIONTH)


def choice_of(
    costs: SavingCosts,
    start: int,
    saving: tuple[str, ...],
    streamed: tuple[int, ...],
    in_flight: int,
    seconds: float,
    host_link: float,
) -> Choice:
    """What a stage takes whose blocks save in a certain way.

    Example:
        >>> choice_of(costs, 0, ("keep", "recompute"), (), in_flight=4, seconds=0.3, host_link=2.5e10).peak

    Args:
        costs: columns of the chain.
        start: first block of the stage.
        saving: what each of its blocks does.
        streamed: blocks whose weights stream, as indices in the chain.
        in_flight: micro-batches whose saved bytes it holds at most.
        seconds: of the stage where all blocks keep what they save, per micro-batch.
        host_link: bytes per second to the host.
    """
    here = slice(start, start + len(saving))
    words = np.array(saving)
    offloaded, weights = words == "offload", list(streamed)
    moved = costs.saved[here] - costs.left[here]
    carried = 2 * int(moved[offloaded].sum()) + int(costs.carried[weights].sum())
    pinned = in_flight * int(costs.pinned_saved[here][offloaded].sum()) + int(costs.pinned_weights[weights].sum())
    again = float(costs.forward_time[here][words == "recompute"].sum())
    needed = float(max(seconds + again, carried / host_link))
    return Choice(
        seconds=needed,
        saving=saving,
        streamed=streamed,
        peak=stage_peak(costs, start, saving, in_flight=in_flight, streamed=streamed),
        carried=carried,
        pinned=pinned,
        bound=needed,
    )
