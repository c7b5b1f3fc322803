"""Exact least time of a stage that has to save memory: which blocks recompute, offload, or stream their weights.

Blocks are decided from the last one to the first. What the decided ones mean for the rest is three kinds of bytes and
two of seconds, so that of two ways which agree on no more than these, the better one in all of them wins; what the
undecided blocks must still save bounds every way from below (their fractional knapsack), and a greedy way from above.

With `q` micro-batches in flight, `s` what rests of a block and `h` what it adds while it runs, a stage peaks at

    static + (q - 1) * sum(s) + max over blocks b of (s of the blocks before b + h of b)

Decided blocks count with `E = (q - 1) * sum(s) - streamed` and `Z = E + max(...)`, in which every undecided block adds
to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.relaxation import Relaxation, relaxed
from autobalance.partitioning.saving_options import Option, options_of
from autobalance.partitioning.savings import KEEP, SavingCosts, stage_peak

Numbers = NDArray[np.float64]

# Ways that are told apart only by this share of the time are one: sums of floating point numbers have no order.
_ROUNDING = 1e-12


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
    """

    seconds: float
    saving: tuple[str, ...]
    streamed: tuple[int, ...]
    peak: int
    carried: int
    pinned: int


def least_seconds(
    costs: SavingCosts,
    start: int,
    stop: int,
    *,
    in_flight: int,
    capacity: int,
    seconds: float,
    host_link: float = np.inf,
    host_memory: int | None = None,
) -> Choice | None:
    """The fastest way for a stage to fit.

    Copies to and from the host run beside the computation: the stage takes the longer of the two.

    Example:
        >>> least_seconds(costs, 0, 12, in_flight=4, capacity=80 * 2**30, seconds=0.3)

    Args:
        costs: columns of the chain, with times of the device in question.
        start: first block.
        stop: one past the last block.
        in_flight: micro-batches whose saved bytes it holds at most.
        capacity: bytes.
        seconds: of the stage where all blocks keep what they save, per micro-batch.
        host_link: bytes per second to the host.
        host_memory: bytes of pinned memory that it may take; None: any.

    Returns:
        None where there is no way.
    """
    keeping = _choice(costs, start, (KEEP,) * (stop - start), (), in_flight, seconds, host_link)
    if keeping.peak <= capacity:
        return keeping
    options = [options_of(costs, block, in_flight, host_link) for block in range(start, stop)]
    room = float(capacity - int(costs.static[start:stop].sum()))
    most = np.inf if host_memory is None else float(host_memory)
    search = _Search(options, in_flight, room, seconds, most)
    found = search.solve()
    if found is None:
        return None
    saving = tuple(option.saving for option in found)
    streamed = tuple(start + at for at, option in enumerate(found) if option.streams)
    return _choice(costs, start, saving, streamed, in_flight, seconds, host_link)


def _choice(
    costs: SavingCosts,
    start: int,
    saving: tuple[str, ...],
    streamed: tuple[int, ...],
    in_flight: int,
    seconds: float,
    host_link: float,
) -> Choice:
    here = slice(start, start + len(saving))
    words = np.array(saving)
    offloaded, weights = words == "offload", list(streamed)
    carried = 2 * int(costs.saved[here][offloaded].sum()) + int(costs.carried[weights].sum())
    pinned = in_flight * int(costs.pinned_saved[here][offloaded].sum()) + int(costs.pinned_weights[weights].sum())
    again = float(costs.forward_time[here][words == "recompute"].sum())
    return Choice(
        seconds=max(seconds + again, carried / host_link),
        saving=saving,
        streamed=streamed,
        peak=stage_peak(costs, start, saving, in_flight=in_flight, streamed=streamed),
        carried=carried,
        pinned=pinned,
    )


class _Search:
    """The ways of one stage.

    Args:
        options: of every block.
        in_flight: micro-batches.
        room: bytes beside what stays.
        seconds: of the stage where all blocks keep what they save.
        pinned: bytes of host memory that it may take.
    """

    def __init__(
        self, options: Sequence[Sequence[Option]], in_flight: int, room: float, seconds: float, pinned: float
    ) -> None:
        self._options = options
        self._in_flight = in_flight
        self._room = room
        self._seconds = seconds
        self._pinned = pinned
        self._relaxation = relaxed(options, in_flight, room, seconds)

    def solve(self) -> list[Option] | None:
        """The option of each block, or None where there is no way."""
        greedy = self._greedy()
        least = self._time(greedy) if greedy is not None else np.inf
        found = self._descend(least * (1 - _ROUNDING))
        return found if found is not None else greedy

    def _time(self, chosen: Sequence[Option]) -> float:
        again = sum(option.seconds for option in chosen)
        return max(self._seconds + again, sum(option.copying for option in chosen))

    def _fits(self, chosen: Sequence[Option]) -> bool:
        state = _State.start()
        for option in reversed(chosen):
            state = state.before(option, self._in_flight)
        return bool(state.taken()[0] <= self._room and state.pinned[0] <= self._pinned)

    def _greedy(self) -> list[Option] | None:
        """What the fractional knapsack takes, whole, and without what turns out not to be needed."""
        chosen = [options[0] for options in self._options]
        taken: list[tuple[int, Option]] = []
        for block, option in self._relaxation.order:
            if self._fits(chosen):
                break
            taken.append((block, chosen[block]))
            chosen[block] = option
        if not self._fits(chosen):
            return None
        for block, before in reversed(taken):
            trial = [*chosen[:block], before, *chosen[block + 1 :]]
            if self._time(trial) <= self._time(chosen) and self._fits(trial):
                chosen = trial
        return chosen

    def _descend(self, least: float) -> list[Option] | None:
        """A way that takes less than `least` seconds, the fastest; None where there is none."""
        states = _State.start()
        history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for block in reversed(range(len(self._options))):
            options = self._options[block]
            grown = _State.joined([states.before(option, self._in_flight) for option in options])
            parents = np.tile(np.arange(len(states)), len(options))
            numbers = np.repeat(np.arange(len(options)), len(states))
            alive = np.flatnonzero(self._alive(grown, block, least))
            if not len(alive):
                return None
            alive = alive[grown.at(alive).front()]
            states = grown.at(alive)
            history.append((parents[alive], numbers[alive]))
        times = np.maximum(self._seconds + states.seconds, states.copying)
        best = int(np.lexsort((states.taken(), states.seconds + states.copying, times))[0])
        chosen = []
        for block, (parents, numbers) in enumerate(reversed(history)):
            chosen.append(self._options[block][int(numbers[best])])
            best = int(parents[best])
        return chosen

    def _alive(self, states: _State, block: int, least: float) -> NDArray[np.bool_]:
        """Ways that may still fit, and take less than `least`."""
        needs = states.taken() - self._room
        alive = (states.pinned <= self._pinned) & (np.maximum(self._seconds + states.seconds, states.copying) < least)
        alive &= self._relaxation.least(block, needs, states.seconds, states.copying) < least
        inner = states.total + states.staging - self._room
        alive &= self._relaxation.least_inside(block, inner, states.seconds, states.copying) < least
        return alive


@dataclass(frozen=True)
class _State:
    """What ways for the last blocks mean for those before them: one entry for each way.

    Attributes:
        total: `E`: what rests of the other micro-batches, less what streams.
        highest: most bytes of the running micro-batch, above what rests of the undecided blocks.
        seconds, copying: of recomputing, and on the host link.
        pinned: host memory.
        next_staged: bytes of the next block whose weights stream.
        staging: most bytes of two neighbours that stream.
    """

    total: Numbers
    highest: Numbers
    seconds: Numbers
    copying: Numbers
    pinned: Numbers
    next_staged: Numbers
    staging: Numbers

    @classmethod
    def start(cls) -> _State:
        """No block is decided."""
        return cls(*(np.zeros(1) for _ in range(7)))

    @classmethod
    def joined(cls, parts: Sequence[_State]) -> _State:
        """All ways of several."""
        return cls(*(np.concatenate(columns) for columns in zip(*(part._columns for part in parts), strict=True)))

    def __len__(self) -> int:
        return len(self.total)

    @property
    def _columns(self) -> tuple[Numbers, ...]:
        return (
            self.total,
            self.highest,
            self.seconds,
            self.copying,
            self.pinned,
            self.next_staged,
            self.staging,
        )

    def at(self, ways: NDArray[np.int64]) -> _State:
        """Some of the ways."""
        return _State(*(column[ways] for column in self._columns))

    def taken(self) -> Numbers:
        """Bytes beside what stays, without undecided blocks."""
        bytes_taken: Numbers = self.total + self.highest + self.staging
        return bytes_taken

    def before(self, option: Option, in_flight: int) -> _State:
        """The same ways with one more block before them."""
        staged = option.staged
        return _State(
            total=self.total + ((in_flight - 1) * option.rests - option.leaves),
            highest=np.maximum(option.runs, self.highest + option.rests),
            seconds=self.seconds + option.seconds,
            copying=self.copying + option.copying,
            pinned=self.pinned + option.pinned,
            next_staged=np.full(len(self), staged) if option.streams else self.next_staged,
            staging=np.maximum(self.staging, self.next_staged + staged) if option.streams else self.staging,
        )

    def front(self) -> NDArray[np.int64]:
        """Ways that no other one equals or surpasses in everything."""
        # Later blocks add to `total`, and to the higher of what they add and `highest`: the sum tells more than either.
        columns = (self.seconds, self.total + self.highest, self.total, *self._columns[3:])
        telling = [column for column in columns if column.max() > column.min()]
        if not telling:
            return np.zeros(1, dtype=np.int64)
        order = np.lexsort(telling[::-1])
        points = np.stack(telling)[:, order]
        kept = np.zeros(0, dtype=np.int64)
        for start in range(0, points.shape[1], _CHUNK):
            chunk = np.arange(start, min(start + _CHUNK, points.shape[1]))
            if len(kept):
                chunk = chunk[~_surpassed(points[:, kept], points[:, chunk]).any(axis=0)]
            inside = _surpassed(points[:, chunk], points[:, chunk])
            kept = np.concatenate([kept, chunk[~np.triu(inside, 1).any(axis=0)]])
        return order[kept]


_CHUNK = 256


def _surpassed(one: Numbers, other: Numbers) -> NDArray[np.bool_]:
    """Entry `[i, j]`: whether point `i` of the first is nowhere above point `j` of the second."""
    below: NDArray[np.bool_] = one[0][:, None] <= other[0][None] * (1 + _ROUNDING)
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        below &= mine[:, None] <= theirs[None]
    return below


__all__ = ["Choice", "Relaxation", "least_seconds"]
