"""How stages on one kind of device save memory: bounds for all of them, and the true choice where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.tables import Table
from autobalance.partitioning.savings.choice import Choice
from autobalance.partitioning.savings.knapsack import least_seconds
from autobalance.partitioning.savings.knapsack_bounds import WindowBounds
from autobalance.partitioning.savings.savings import KEEP, SavingCosts, stage_peak

Stage = tuple[int, int, int]
"""Micro-batches in flight, first unit, one past the last unit."""


@dataclass(frozen=True)
class Allowed:
    """What blocks may do to save memory.

    Attributes:
        recompute: run their forward again in the backward.
        offload: keep what they save, and weights, on the host.
        host_memory: bytes of pinned memory for that.
        solver: whether a solver may be asked, which takes seconds.
    """

    recompute: bool = False
    offload: bool = False
    host_memory: int = 0
    solver: bool = True


@dataclass(frozen=True)
class HostSteps:
    """Stages whose optimizer runs on the host.

    Attributes:
        costs: columns of the units, without the optimizer's state.
        seconds: once per step, of every unit.
        held: host memory in bytes, of every unit.
        state: bytes that leave the device, of every unit.
        seconds_beside, held_beside, state_beside: the same of what lies on the device beside the chain.
    """

    costs: SavingCosts
    seconds: NDArray[np.float64]
    held: NDArray[np.int64]
    state: NDArray[np.int64]
    seconds_beside: float = 0.0
    held_beside: int = 0
    state_beside: int = 0

    def once(self, start: int, stop: int) -> float:
        """Seconds per step of a stage.

        Args:
            start, stop: its first unit, and one past its last.
        """
        return float(self.seconds[start:stop].sum()) + self.seconds_beside

    def memory(self, start: int, stop: int) -> int:
        """Host memory of a stage in bytes.

        Args:
            start, stop: as for `once`.
        """
        return int(self.held[start:stop].sum()) + self.held_beside

    def freed(self, start: int, stop: int) -> int:
        """Bytes of state that leave the device of a stage.

        Args:
            start, stop: as for `once`.
        """
        return int(self.state[start:stop].sum()) + self.state_beside


@dataclass
class Saver:
    """What stages on one kind of device can save.

    A stage may have its optimizer's state on the host. What that takes once per step is compared with what other ways
    take for every micro-batch by its share: `seconds / micro_batches` more for each of them. With stages that save
    nothing else that makes `sum(t + u / m) + (m - 1) * max(t + u / m)` of a step with the stage times `t` and the
    once-per-step times `u`.

    Attributes:
        costs: columns of the units of the chain.
        capacity: bytes of the device.
        host_link: bytes per second to the host.
        host_memory: bytes of pinned memory that a stage may take.
        on_host: the same with the optimizer on the host; None: it stays on the device.
        micro_batches: of a step.
        choices: true choices that are known; None: the stage has no way to fit.
    """

    costs: SavingCosts
    capacity: int
    host_link: float
    host_memory: int | None = None
    on_host: HostSteps | None = None
    micro_batches: int = 1
    choices: dict[Stage, Choice | None] = field(default_factory=dict)
    _solved: set[Stage] = field(default_factory=set, repr=False)
    _less: dict[Stage, int] = field(default_factory=dict, repr=False)
    _bounds: dict[int, list[WindowBounds]] = field(default_factory=dict, repr=False)
    _host_limits: dict[Stage, int] = field(default_factory=dict, repr=False)

    def seconds(self, held: int, plain: Table, over: NDArray[np.bool_], *, loose: bool = False) -> Table:
        """Seconds of every stage, of those that have to save a lower bound until their choice is known.

        Args:
            held: micro-batches in flight.
            plain: `[before, k, d]`: seconds where all blocks keep what they save.
            over: `[k, d]`: stages that do not fit so.
            loose: whether lower bounds are wanted of stages whose choice is not proved.
        """
        width = plain.shape[-1]
        times: Table = plain.copy()
        for before, seconds in enumerate(plain):
            least = self._least(held, seconds)
            times[before][over] = least[over]
        for (count, start, stop), choice in self.choices.items():
            if count == held and stop - start <= width and over[start, stop - start - 1]:
                at = (slice(None), start, stop - start - 1)
                found = np.inf if choice is None else self.with_choice(plain[at], choice, start)
                if loose and choice is not None and not choice.proved:
                    # What is proved of one way into the stage holds for slower ones.
                    found = np.maximum(times[at], np.where(found >= choice.seconds, choice.bound, 0.0))
                times[at] = found
        return times

    def with_choice(self, plain: NDArray[np.float64], choice: Choice, start: int) -> NDArray[np.float64]:
        """Seconds of a stage that saves in a certain way, from those of one that keeps all."""
        again = sum(
            float(self.costs.forward_time[start + at]) for at, word in enumerate(choice.saving) if word == "recompute"
        )
        copied = choice.carried / self.host_link
        times: NDArray[np.float64] = np.maximum(plain + again, copied) + choice.once / self.micro_batches
        return times

    @property
    def proved(self) -> bool:
        """Whether no stage has a faster way than the one that is known."""
        return all(choice is None or choice.proved for choice in self.choices.values())

    def choose(
        self, stage: Stage, seconds: float, peak: int, peak_without_state: int, *, program: bool = False
    ) -> bool:
        """Find the true choice of a stage.

        Args:
            stage: which.
            seconds: where all its blocks keep what they save.
            peak: bytes that a replay, or the tables, then say.
            peak_without_state: the same where the optimizer's storages are on the host.
            program: whether a solver may prove a choice that is known but not proved.

        Returns:
            Whether it was not known before.
        """
        if stage in self.choices:
            known = self.choices[stage]
            if not program or known is None or known.proved or stage in self._solved:
                return False
            self._solved.add(stage)
        _, start, stop = stage
        most = self._host_limits.get(stage, self.host_memory)
        best = self._choice(self.costs, stage, seconds, peak, most, program)
        if self.on_host is not None and (once := self.on_host.once(start, stop)) > 0:
            share, held = once / self.micro_batches, self.on_host.memory(start, stop)
            rest = None if most is None else most - held
            if (rest is None or rest >= 0) and (best is None or seconds + share < best.seconds):
                other = self._choice(self.on_host.costs, stage, seconds, peak_without_state, rest, program)
                if other is not None:
                    bound = min(other.bound + share, np.inf if best is None else best.bound)
                    other = replace(
                        other, seconds=other.seconds + share, pinned=other.pinned + held, once=once, bound=bound
                    )
                    best = replace(best, bound=bound) if best and best.seconds <= other.seconds else other
        self.choices[stage] = best
        return True

    def limit_host(self, stage: Stage, most: int | None) -> int | None:
        """Let a stage take no more host memory than that, and choose again.

        Args:
            stage: which.
            most: bytes; None: as any stage.

        Returns:
            What limited it before.
        """
        before = self._host_limits.pop(stage, None)
        if most is not None:
            self._host_limits[stage] = most
        self.choices.pop(stage, None)
        self._solved.discard(stage)
        return before

    def _choice(
        self, costs: SavingCosts, stage: Stage, seconds: float, peak: int, host_memory: int | None, program: bool
    ) -> Choice | None:
        held, start, stop = stage
        # What the trace holds beyond the textbook's step stays whatever the blocks do.
        beyond = peak - stage_peak(costs, start, [KEEP] * (stop - start), in_flight=held)
        return least_seconds(
            costs,
            start,
            stop,
            in_flight=held,
            capacity=self.capacity - beyond - self._less.get(stage, 0),
            seconds=seconds,
            host_link=self.host_link,
            host_memory=host_memory,
            program=program,
        )

    def _least(self, held: int, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bounds of all stages, the smaller of those with the optimizer on the device and on the host."""
        width = seconds.shape[-1]
        if width not in self._bounds:
            ways = [self.costs] if self.on_host is None else [self.costs, self.on_host.costs]
            self._bounds[width] = [WindowBounds(costs, width, self.host_link) for costs in ways]
        here, *there = self._bounds[width]
        least = here.least(in_flight=held, capacity=self.capacity, seconds=seconds)
        if self.on_host is not None:
            sums = np.concatenate([[0.0], np.cumsum(self.on_host.seconds)])
            stops = np.minimum(np.arange(len(seconds))[:, None] + np.arange(width)[None] + 1, len(seconds))
            share = (sums[stops] - sums[:-1, None] + self.on_host.seconds_beside) / self.micro_batches
            for bounds in there:
                away = bounds.least(in_flight=held, capacity=self.capacity, seconds=seconds)
                least = np.minimum(least, away + share)
        return least

    def learn(self, stage: Stage, more: int) -> None:
        """Note that a stage held more than its choice was to, so that it is chosen again.

        Args:
            stage: which.
            more: bytes.
        """
        self._less[stage] = self._less.get(stage, 0) + more
        self.choices.pop(stage, None)
        self._solved.discard(stage)


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

    # A unit streams as a whole or not at all.
    whole = [bool(((blocks.streamable > 0) | (blocks.static == 0))[owners].all()) for owners in units]

    def streamed(column: NDArray[np.int64]) -> NDArray[np.int64]:
        sums: NDArray[np.int64] = np.where(whole, summed(column), 0)
        return sums

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
        streamable=streamed(blocks.streamable),
        carried=streamed(blocks.carried),
        staged=streamed(blocks.staged),
        pinned_saved=summed(blocks.pinned_saved),
        pinned_weights=streamed(blocks.pinned_weights),
    )
