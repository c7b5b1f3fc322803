"""What a block may do to hold less memory, and what a stage that does so holds at its peak.

A block **keeps** its saved bytes, or makes them again before its backward (**recompute**: only its inputs rest between
forward and backward), or sends them to pinned host memory and fetches them again (**offload**: nothing rests). The
saved bytes of every block are on the device while the block itself runs, forward and backward. Weights that **stream**
are in pinned host memory; those of the block that runs and of the next one that streams are on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.block_cost import BlockCost
from autobalance.profiling.timeline import Timeline
from autobalance.timelines.freed import freed_bytes
from autobalance.units import pinned_bytes

Saving = Literal["keep", "recompute", "offload"]
KEEP: Final = "keep"
RECOMPUTE: Final = "recompute"
OFFLOAD: Final = "offload"

Bytes = NDArray[np.int64]
Seconds = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SavingCosts:
    """Columns of a chain of blocks, for one micro-batch: what each could save, and what that takes.

    Example:
        >>> costs = saving_costs(profile.blocks, [block.forward_time for block in profile.blocks])

    Attributes:
        static: bytes that stay.
        saved: bytes kept from forward to backward.
        kept: bytes that stay of these where the block is recomputed: its inputs, and what others need.
        left: bytes that stay of these where they are offloaded: what others need.
        forward_transient, backward_transient: bytes alive only inside the forward, or the backward.
        forward_time: seconds of one forward on the device in question.
        recomputable, offloadable: whether its saved bytes may be made again, or go to the host.
        streamable: static bytes that leave the device where its weights stream; 0: they may not.
        carried: bytes over the host link per micro-batch where its weights stream, both passes and all directions.
        staged: bytes on the device while a block runs, or is next, whose weights stream.
        pinned_saved, pinned_weights: pinned host memory for its saved bytes of one micro-batch, and for its weights.
    """

    static: Bytes
    saved: Bytes
    kept: Bytes
    left: Bytes
    forward_transient: Bytes
    backward_transient: Bytes
    forward_time: Seconds
    recomputable: Flags
    offloadable: Flags
    streamable: Bytes
    carried: Bytes
    staged: Bytes
    pinned_saved: Bytes
    pinned_weights: Bytes

    def __len__(self) -> int:
        return len(self.static)


def saving_costs(
    blocks: Sequence[BlockCost],
    forward_time: Sequence[float],
    *,
    recompute: bool = True,
    offload: bool = False,
    stream: Sequence[str] = (),
    timeline: Timeline | None = None,
    training: bool = True,
    optimizer_on_host: bool = False,
) -> SavingCosts:
    """The columns of a chain, from the rows of a profile and its storage events.

    Example:
        >>> saving_costs(profile.blocks, forward_time, timeline=profile.timeline, offload=True, stream=("frozen",))

    Args:
        blocks: rows, of one micro-batch.
        forward_time: seconds of each block's forward on the device in question.
        recompute: whether blocks may be recomputed; those that do not save more than their inputs never are.
        offload: whether saved bytes may go to the host.
        stream: whose weights may stream: "frozen", "trainable" or both.
        timeline: of one micro-batch, which tells what of the saved bytes only the block's own backward uses; None: that
            is all, and inputs are among them.
        training: whether there is a backward, for which weights that stream come a second time.
        optimizer_on_host: whether the optimizer's state is on the host. Where it is on the device, blocks that have
            such state do not stream.

    Raises:
        ValueError: another number of times than of blocks, or an unknown word in `stream`.
    """
    if len(forward_time) != len(blocks):
        raise ValueError(f"forward_time has {len(forward_time)} entries for {len(blocks)} blocks")
    unknown = sorted(set(stream) - {"frozen", "trainable"})
    if unknown:
        raise ValueError(f"stream names {unknown[0]!r}; choose among 'frozen' and 'trainable'")

    def column(values: Sequence[int]) -> Bytes:
        return np.array(values, dtype=np.int64)

    saved, kept = column([block.saved for block in blocks]), column([block.inputs for block in blocks])
    left, pinned = np.zeros_like(saved), column([pinned_bytes([block.saved]) for block in blocks])
    known = np.ones(len(blocks), dtype=bool)
    if timeline is not None:
        freed = freed_bytes(timeline, len(blocks))
        known = freed.known
        kept = np.where(known, saved - freed.recomputed, saved)
        left = np.where(known, np.maximum(0, saved - freed.offloaded), saved)
        pinned = freed.pinned
    frozen = np.array([not block.gradients for block in blocks], dtype=bool)
    weights = column([block.weights + block.buffers for block in blocks])
    gradients = column([block.gradients for block in blocks])
    state = column([block.optimizer for block in blocks])
    static = weights + gradients + (0 if optimizer_on_host else state)
    may_stream = np.where(frozen, "frozen" in stream, "trainable" in stream) & (weights > 0)
    may_stream &= optimizer_on_host | (state == 0)
    return SavingCosts(
        static=static,
        saved=saved,
        kept=kept,
        left=left,
        forward_transient=column([block.forward_transient for block in blocks]),
        backward_transient=column([block.backward_transient for block in blocks]),
        forward_time=np.array(forward_time, dtype=np.float64),
        recomputable=(saved > kept) & known & recompute,
        offloadable=(saved > left) & known & offload,
        # Gradients of a block whose weights stream go to the host as well, and are gathered there.
        streamable=np.where(may_stream, static, 0),
        carried=np.where(may_stream, (2 if training else 1) * weights + gradients, 0),
        staged=np.where(may_stream, weights + gradients, 0),
        pinned_saved=pinned,
        pinned_weights=column(
            [pinned_bytes(sizes) for sizes in np.where(may_stream, [weights, gradients], 0).T.tolist()]
        ),
    )


def resting(costs: SavingCosts, saving: Sequence[str], start: int = 0) -> Bytes:
    """Bytes that rest on the device between forward and backward of each block, for one micro-batch.

    Example:
        >>> resting(costs, ["keep", "recompute", "offload"])

    Args:
        costs: of the chain.
        saving: of the blocks from `start` on.
        start: first block.
    """
    here = slice(start, start + len(saving))
    words = np.array(saving)
    rests: Bytes = np.select(
        [words == KEEP, words == RECOMPUTE], [costs.saved[here], costs.kept[here]], costs.left[here]
    )
    return rests


def running(costs: SavingCosts, saving: Sequence[str], start: int = 0) -> Bytes:
    """Most bytes that each block adds to what rests of the blocks before it, while it runs.

    Forward: its transient bytes, then what it saves. Backward: what it has saved, and transient bytes. A recomputed
    block runs its forward in between, beside its inputs.

    Example:
        >>> running(costs, ["keep", "recompute", "offload"])

    Args:
        costs: of the chain.
        saving: "keep", "recompute" or "offload" of consecutive blocks.
        start: the first of these.
    """
    here = slice(start, start + len(saving))
    again = np.where(np.array(saving) == RECOMPUTE, costs.kept[here], 0)
    runs: Bytes = np.maximum(costs.forward_transient[here] + again, costs.saved[here] + costs.backward_transient[here])
    return runs


def stage_peak(
    costs: SavingCosts, start: int, saving: Sequence[str], *, in_flight: int, streamed: Sequence[int] = ()
) -> int:
    """Peak bytes of a stage in the textbook's step.

    The other micro-batches in flight rest while one runs; of that one, the blocks before the running one rest.

    Example:
        >>> stage_peak(costs, 0, ["keep"] * len(costs), in_flight=4)

    Args:
        costs: of the chain.
        start: first block of the stage.
        saving: "keep", "recompute" or "offload" of each of its blocks.
        in_flight: micro-batches whose saved bytes it holds at most.
        streamed: blocks of the stage whose weights stream, in call order.
    """
    rests, runs = resting(costs, saving, start), running(costs, saving, start)
    before = np.cumsum(rests) - rests
    static = int(costs.static[start : start + len(saving)].sum())
    static -= int(costs.streamable[list(streamed)].sum())
    staged = costs.staged[list(streamed)]
    pairs = staged + np.append(staged[1:], 0)
    return static + int(pairs.max(initial=0)) + (in_flight - 1) * int(rests.sum()) + int((before + runs).max(initial=0))
