"""How stages on one kind of device save memory: bounds for all of them, and the true choice where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.chain import Chain
from autobalance.partitioning.knapsack import Choice, least_seconds
from autobalance.partitioning.knapsack_bounds import WindowBounds
from autobalance.partitioning.savings import KEEP, SavingCosts, stage_peak
from autobalance.partitioning.tables import Table

Stage = tuple[int, int, int]
"""Micro-batches in flight, first unit, one past the last unit."""


@dataclass(frozen=True)
class Allowed:
    """What blocks may do to save memory.

    Attributes:
        recompute: run their forward again in the backward.
        offload: keep what they save, and weights, on the host.
        host_memory: bytes of pinned memory for that.
    """

    recompute: bool = False
    offload: bool = False
    host_memory: int = 0


@dataclass
class Saver:
    """What stages on one kind of device can save.

    Attributes:
        costs: columns of the units of the chain.
        capacity: bytes of the device.
        host_link: bytes per second to the host.
        host_memory: bytes of pinned memory that a stage may take.
        choices: true choices that are known; None: the stage has no way to fit.
    """

    costs: SavingCosts
    capacity: int
    host_link: float
    host_memory: int | None = None
    choices: dict[Stage, Choice | None] = field(default_factory=dict)
    _less: dict[Stage, int] = field(default_factory=dict, repr=False)
    _bounds: dict[int, WindowBounds] = field(default_factory=dict, repr=False)

    def seconds(self, held: int, plain: Table, over: NDArray[np.bool_]) -> Table:
        """Seconds of every stage, of those that have to save a lower bound until their choice is known.

        Args:
            held: micro-batches in flight.
            plain: `[before, k, d]`: seconds where all blocks keep what they save.
            over: `[k, d]`: stages that do not fit so.
        """
        width = plain.shape[-1]
        if width not in self._bounds:
            self._bounds[width] = WindowBounds(self.costs, width, self.host_link)
        times: Table = plain.copy()
        for before, seconds in enumerate(plain):
            least = self._bounds[width].least(in_flight=held, capacity=self.capacity, seconds=seconds)
            times[before][over] = least[over]
        for (count, start, stop), choice in self.choices.items():
            if count == held and stop - start <= width and over[start, stop - start - 1]:
                at = (slice(None), start, stop - start - 1)
                times[at] = np.inf if choice is None else self.with_choice(plain[at], choice, start)
        return times

    def with_choice(self, plain: NDArray[np.float64], choice: Choice, start: int) -> NDArray[np.float64]:
        """Seconds of a stage that saves in a certain way, from those of one that keeps all."""
        again = sum(
            float(self.costs.forward_time[start + at]) for at, word in enumerate(choice.saving) if word == "recompute"
        )
        times: NDArray[np.float64] = np.maximum(plain + again, choice.carried / self.host_link)
        return times

    def choose(self, stage: Stage, seconds: float, peak: int) -> bool:
        """Find the true choice of a stage.

        Args:
            stage: which.
            seconds: where all its blocks keep what they save.
            peak: bytes that a replay, or the tables, then say.

        Returns:
            Whether it was not known before.
        """
        if stage in self.choices:
            return False
        held, start, stop = stage
        # What the trace holds beyond the textbook's step stays whatever the blocks do.
        beyond = peak - stage_peak(self.costs, start, [KEEP] * (stop - start), in_flight=held)
        self.choices[stage] = least_seconds(
            self.costs,
            start,
            stop,
            in_flight=held,
            capacity=self.capacity - beyond - self._less.get(stage, 0),
            seconds=seconds,
            host_link=self.host_link,
            host_memory=self.host_memory,
        )
        return True

    def learn(self, stage: Stage, more: int) -> None:
        """Note that a stage held more than its choice was to, so that it is chosen again."""
        self._less[stage] = self._less.get(stage, 0) + more
        self.choices.pop(stage, None)


def unit_costs(blocks: SavingCosts, chain: Chain) -> SavingCosts:
    """Columns of the units of a chain, from those of its blocks.

    Example:
        >>> unit_costs(saving_costs(profile.blocks, times), chain)

    Args:
        blocks: columns of the blocks.
        chain: whose units they make up.
    """
    units = [[owner for owner in owners if owner >= 0] for owners in chain.units]

    def summed(column: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([int(column[owners].sum()) for owners in units], dtype=np.int64)

    def largest(column: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([int(column[owners].max(initial=0)) for owners in units], dtype=np.int64)

    return replace(
        blocks,
        static=summed(blocks.static),
        saved=summed(blocks.saved),
        kept=summed(np.where(blocks.recomputable, blocks.kept, blocks.saved)),
        left=summed(blocks.left),
        forward_transient=largest(blocks.forward_transient),
        backward_transient=largest(blocks.backward_transient),
        forward_time=np.array(
            [float(np.where(blocks.recomputable, blocks.forward_time, 0.0)[owners].sum()) for owners in units]
        ),
        recomputable=np.array([bool(blocks.recomputable[owners].any()) for owners in units]),
        offloadable=np.array([bool(blocks.offloadable[owners].all()) and bool(owners) for owners in units]),
        streamable=summed(blocks.streamable),
        carried=summed(blocks.carried),
        staged=summed(blocks.staged),
        pinned_saved=summed(blocks.pinned_saved),
        pinned_weights=summed(blocks.pinned_weights),
    )
