"""What one block of a stage can do: keep, recompute or offload what it saves, with its weights there or streaming."""

from __future__ import annotations

from dataclasses import dataclass

from autobalance.partitioning.savings.savings import KEEP, OFFLOAD, RECOMPUTE, SavingCosts


@dataclass(frozen=True)
class Option:
    """One of the ways for a block.

    Attributes:
        saving: "keep", "recompute" or "offload".
        streams: whether its weights stream.
        rests: bytes that rest between forward and backward, per micro-batch.
        runs: bytes that it adds to the blocks before it while it runs.
        leaves: static bytes that are not on the device.
        staged: bytes on the device while it runs, or is next.
        seconds: of running its forward again.
        copying: seconds on the host link.
        pinned: host memory in bytes.
    """

    saving: str
    streams: bool
    rests: float
    runs: float
    leaves: float
    staged: float
    seconds: float
    copying: float
    pinned: float


def options_of(costs: SavingCosts, block: int, in_flight: int, host_link: float) -> list[Option]:
    """All options of a block; the first keeps everything where it is.

    Example:
        >>> options_of(costs, 3, in_flight=4, host_link=25e9)

    Args:
        costs: columns of the chain.
        block: its index.
        in_flight: micro-batches, each of which has saved bytes of its own.
        host_link: bytes per second to the host.
    """
    saved, kept, left = float(costs.saved[block]), float(costs.kept[block]), float(costs.left[block])
    ahead, back = float(costs.forward_transient[block]), float(costs.backward_transient[block])
    runs = max(ahead, saved + back)
    pinned = float(in_flight * costs.pinned_saved[block])
    ways: list[tuple[str, float, float, float, float, float]] = [(KEEP, saved, runs, 0.0, 0.0, 0.0)]
    if costs.recomputable[block]:
        ways.append((RECOMPUTE, kept, max(runs, ahead + kept), float(costs.forward_time[block]), 0.0, 0.0))
    if costs.offloadable[block]:
        ways.append((OFFLOAD, left, runs, 0.0, 2 * (saved - left) / host_link, pinned))
    options = [
        Option(saving, False, rests, runs, 0.0, 0.0, seconds, copying, pinned)
        for saving, rests, runs, seconds, copying, pinned in ways
    ]
    if costs.streamable[block] > 0:
        leaves, staged = float(costs.streamable[block]), float(costs.staged[block])
        carrying, pages = float(costs.carried[block]) / host_link, float(costs.pinned_weights[block])
        options += [
            Option(saving, True, rests, runs, leaves, staged, seconds, copying + carrying, pinned + pages)
            for saving, rests, runs, seconds, copying, pinned in ways
        ]
    return options
