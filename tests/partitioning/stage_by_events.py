"""Random chains that can save memory, and the peak of a stage by going through all that happens in it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from autobalance.partitioning.savings.savings import SavingCosts


def random_costs(draw: random.Random, blocks: int, *, offload: bool = False, stream: bool = False) -> SavingCosts:
    def column(low: int, high: int) -> np.ndarray:
        return np.array([draw.randint(low, high) for _ in range(blocks)], dtype=np.int64)

    weights, saved = column(0, 20), column(0, 40)
    may_stream = np.array([stream and draw.random() < 0.7 for _ in range(blocks)])
    return SavingCosts(
        static=weights + 5,
        saved=saved,
        kept=column(0, 12),
        left=np.minimum(saved, column(0, 6)),
        forward_transient=column(0, 30),
        backward_transient=column(0, 30),
        forward_time=np.array([draw.choice([0.0, 1.0, draw.uniform(0.5, 3)]) for _ in range(blocks)]),
        recomputable=np.array([draw.random() < 0.8 for _ in range(blocks)]),
        offloadable=np.array([offload and draw.random() < 0.8 for _ in range(blocks)]),
        streamable=np.where(may_stream, weights, 0),
        carried=np.where(may_stream, 2 * weights, 0),
        staged=np.where(may_stream, weights, 0),
        pinned_saved=saved * 2,
        pinned_weights=np.where(may_stream, weights * 2, 0),
    )


def peak_of_events(costs: SavingCosts, saving: Sequence[str], streamed: Sequence[int], in_flight: int) -> int:
    """Every birth and death of one stage: so many forwards, then backward and forward in turn, then backwards."""
    used = peak = int(costs.static.sum())
    held = [costs.staged[block] for block in streamed]
    used -= sum(int(costs.streamable[block]) for block in streamed)
    used += max((int(one + other) for one, other in zip(held, [*held, 0][1:], strict=True)), default=0)

    def change(nbytes: int) -> None:
        nonlocal used, peak
        used += int(nbytes)
        peak = max(peak, used)

    def forward() -> None:
        for block, word in enumerate(saving):
            change(costs.forward_transient[block])
            change(-costs.forward_transient[block])
            change(costs.saved[block])
            if word != "keep":
                change((costs.kept if word == "recompute" else costs.left)[block] - costs.saved[block])

    def backward() -> None:
        for block in reversed(range(len(saving))):
            if saving[block] == "recompute":
                change(costs.forward_transient[block])
                change(-costs.forward_transient[block])
                change(costs.saved[block] - costs.kept[block])
            elif saving[block] == "offload":
                change(costs.saved[block] - costs.left[block])
            change(costs.backward_transient[block])
            change(-costs.backward_transient[block])
            change(-costs.saved[block])

    for _ in range(in_flight):
        forward()
    for _ in range(2):
        backward()
        forward()
    for _ in range(in_flight):
        backward()
    return peak
