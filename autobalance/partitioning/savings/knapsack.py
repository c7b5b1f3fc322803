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
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.savings.choice import MILLIONTH, Choice, choice_of
from autobalance.partitioning.savings.relaxation import relaxed
from autobalance.partitioning.savings.saving_options import Option, options_of
from autobalance.partitioning.savings.saving_program import has_solver, solve_program
from autobalance.partitioning.savings.saving_ways import ROUNDING, OneWay, Ways
from autobalance.partitioning.savings.savings import KEEP, SavingCosts
from autobalance.partitioning.savings.staging import least_staging

Numbers = NDArray[np.float64]

# Ways that are followed at most, one number after the other, the last one for stages of few blocks only. Where there
# are more, what is found counts as proved if it is this close to its bound.
_WIDTHS = (32, 256, 8192)
_SHORT = 20
# Parts of the distance between the bound of a stage and its greedy way, in which its fastest way is looked for.
_SHARES = (1 / 16, 1 / 4)
_FEW = 64


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
    program: bool = True,
) -> Choice | None:
    """The fastest way for a stage to fit.

    Copies to and from the host run beside the computation: the stage takes the longer of the two. Of long stages that
    may offload, the way is proved the fastest only where SciPy is installed; else `bound` says how far off it may be.

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
        program: whether SciPy may be asked, which can take a second.

    Returns:
        None where there is no way.
    """
    keeping = choice_of(costs, start, (KEEP,) * (stop - start), (), in_flight, seconds, host_link)
    if keeping.peak <= capacity:
        return keeping
    options = [options_of(costs, block, in_flight, host_link) for block in range(start, stop)]
    room = float(capacity - int(costs.static[start:stop].sum()))
    most = np.inf if host_memory is None else float(host_memory)
    search = _Search(options, in_flight, room, seconds, most)
    solved = search.solve(program=program and has_solver())
    if solved is None:
        return None
    found, bound = search.lightest(solved[0]), solved[1]
    saving = tuple(option.saving for option in found)
    streamed = tuple(start + at for at, option in enumerate(found) if option.streams)
    choice = choice_of(costs, start, saving, streamed, in_flight, seconds, host_link)
    return replace(choice, bound=min(bound, choice.seconds))


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
        self._least = self._relaxation.bound
        staging = least_staging(options, in_flight, room)
        if staging:
            self._least = max(self._least, relaxed(options, in_flight, room - staging, seconds).bound)
        self._copies = any(option.copying for each in options for option in each)
        self._is_cut = False

    def solve(self, *, program: bool) -> tuple[list[Option], float] | None:
        """The option of each block, and seconds below which no way is; None where there is no way."""
        best = self._greedy() or self._descend(self._options, np.inf, _WIDTHS[-1])
        if best is None:
            return None
        is_short = len(self._options) <= _SHORT
        close = ROUNDING if is_short else MILLIONTH
        for width in _WIDTHS if is_short else _WIDTHS[:-1]:
            if self._time(best) <= self._least * (1 + close):
                break
            best, is_best = self._narrow(best, width)
            if is_best:
                return best, self._time(best)
            if not is_short and program and self._copies:
                return self._by_program(best)
        return best, self._least

    def lightest(self, best: list[Option]) -> list[Option]:
        """A way that takes no longer and copies less, as far as one is found."""
        if not any(option.copying for option in best):
            return best
        most = self._time(best)
        if len(best) <= _SHORT:
            found = self._descend(self._options, most * (1 + 2 * ROUNDING), _WIDTHS[0])
            if found is not None and self._time(found) <= most * (1 + ROUNDING) and _copying(found) < _copying(best):
                best = found
        way = OneWay(best, self._in_flight)
        for block in sorted(range(len(best)), key=lambda block: -best[block].copying):
            before = way.options[block]
            less = (option for option in self._options[block] if option.copying < before.copying)
            for option in sorted(less, key=lambda option: option.copying):
                way.put(block, option)
                if self._fits(way) and self._time(way.options) <= most * (1 + ROUNDING):
                    break
                way.put(block, before)
        return way.options

    def _narrow(self, best: list[Option], width: int) -> tuple[list[Option], bool]:
        """A way at least as fast, following so many ways at most, and whether none is faster."""
        most = self._time(best)
        # The fewer ways are of interest, the sooner they are through; few stages are far above their bound.
        for share in (*_SHARES, 1.0):
            target = self._least + share * (most - self._least) if share < 1 else most * (1 - ROUNDING)
            found = self._descend(self._relaxation.worth(self._options, target), target, width)
            best = found or best
            if not self._is_cut and (found or share == 1):
                return best, True
            if found:
                break
        return best, False

    def _by_program(self, best: list[Option]) -> tuple[list[Option], float]:
        """The same by a solver, whose solutions may seem to fit by a rounding: such a one is not taken."""
        for tight in (False, True):
            found, bound = solve_program(
                self._options, self._in_flight, self._room, self._seconds, self._pinned, tight=tight
            )
            if not tight:
                self._least = max(self._least, bound)
            if found is None or not self._fits(OneWay(found, self._in_flight)):
                continue
            return (found if self._time(found) < self._time(best) else best), self._least
        return best, self._least

    def _time(self, chosen: Sequence[Option]) -> float:
        again = sum(option.seconds for option in chosen)
        return max(self._seconds + again, sum(option.copying for option in chosen))

    def _greedy(self) -> list[Option] | None:
        """What the fractional knapsack takes, whole, and without what turns out not to be needed."""
        way = OneWay([options[0] for options in self._options], self._in_flight)
        taken: list[tuple[int, Option]] = []
        for block, option in self._relaxation.order:
            if self._fits(way):
                break
            taken.append((block, way.options[block]))
            way.put(block, option)
        if not self._fits(way):
            return None
        least = self._time(way.options)
        for block, before in reversed(taken):
            after = way.options[block]
            way.put(block, before)
            if self._fits(way) and self._time(way.options) <= least:
                least = self._time(way.options)
            else:
                way.put(block, after)
        return way.options

    def _fits(self, way: OneWay) -> bool:
        return way.taken() <= self._room and way.pinned() <= self._pinned

    def _descend(self, all_options: Sequence[Sequence[Option]], least: float, width: int) -> list[Option] | None:
        """The fastest way that takes less than `least` seconds, of those that are followed; None where there is none.

        At most `width` ways are followed from block to block; `_is_cut` says afterwards whether there were more.
        """
        self._is_cut = False
        states = Ways.start()
        history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for block in reversed(range(len(all_options))):
            options = all_options[block]
            if not options:
                return None
            grown = Ways.joined([states.before(option, self._in_flight) for option in options])
            parents = np.tile(np.arange(len(states)), len(options))
            numbers = np.repeat(np.arange(len(options)), len(states))
            if block and len(options) == 1 and len(grown) < _FEW:  # nothing to choose, little to forget
                states = grown
                history.append((parents, numbers))
                continue
            bounds = self._bounds(grown, block)
            alive = np.flatnonzero(bounds < least)
            if not len(alive):
                return None
            alive = alive[grown.at(alive).front()]
            if len(alive) > width:
                self._is_cut = True
                rank = bounds[alive] if np.isfinite(least) else grown.taken()[alive]
                alive = alive[np.argpartition(rank, width)[:width]]
            states = grown.at(alive)
            history.append((parents[alive], numbers[alive]))
        times = np.maximum(self._seconds + states.seconds, states.copying)
        best = int(np.lexsort((states.taken(), states.seconds + states.copying, times))[0])
        chosen = []
        for options, (parents, numbers) in zip(all_options, reversed(history), strict=True):
            chosen.append(options[int(numbers[best])])
            best = int(parents[best])
        return chosen

    def _bounds(self, states: Ways, block: int) -> Numbers:
        """Least time of each way, infinite where it cannot fit."""
        needs = states.taken() - self._room
        bounds = np.maximum(self._seconds + states.seconds, states.copying)
        outer = self._relaxation.least(block, needs, states.seconds, states.copying)
        bounds = np.where(states.pinned <= self._pinned, np.maximum(bounds, outer), np.inf)
        inner = states.total + states.staging - self._room
        return np.maximum(bounds, self._relaxation.least_inside(block, inner, states.seconds, states.copying))


def _copying(chosen: Sequence[Option]) -> float:
    return sum(option.copying for option in chosen)
