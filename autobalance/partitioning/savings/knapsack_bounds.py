"""Lower bounds of the time of every stage of a chain, all at once: fractional knapsacks of all windows.

A stage `[i, j)` that holds more than its device must save the difference, and saves at most so much per byte of a block
for each of its micro-batches. The cheapest way takes the blocks in the order of price per byte, the last one in part
(Dantzig 1957). That order is one for the whole chain, so that with sums over blocks and over places in the order, a few
steps of bisection find the last block for all windows together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.savings.relaxation import Step, steps_of
from autobalance.partitioning.savings.saving_options import Option, options_of
from autobalance.partitioning.savings.savings import SavingCosts

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

# Parts of the chain whose blocks offload rather than recompute, for each of which there is a bound.
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


class WindowBounds:
    """Bounds of the stages `[k, k + d + 1)` of a chain, for `d` below `longest`.

    Example:
        >>> bounds = WindowBounds(costs, longest=64, host_link=25e9)
        >>> bounds.least(in_flight=4, capacity=80 * 2**30, seconds=seconds)[0, 7]  # of the stage [0, 8)

    Args:
        costs: columns of the chain, with times of the device in question.
        longest: most blocks of a stage.
        host_link: bytes per second to the host.
    """

    def __init__(self, costs: SavingCosts, longest: int, host_link: float = np.inf) -> None:
        self._costs, self._longest, self._host_link = costs, longest, host_link
        self._tables: dict[tuple[int, float], _Table] = {}
        self._options: dict[int, list[list[Option]]] = {}
        self._streams = bool(costs.streamable.any())
        self._copies = self._streams or bool(costs.offloadable.any())

    def least(self, *, in_flight: int, capacity: int, seconds: Numbers) -> Numbers:
        """Seconds below which no stage is, whatever its blocks do to fit.

        Exact where a stage fits as it is.

        Args:
            in_flight: micro-batches whose saved bytes a stage holds at most.
            capacity: bytes.
            seconds: of the stages where all blocks keep what they save, of the shape of the result.

        Returns:
            An array of `len(costs)` rows and `longest` columns; infinite where a stage cannot fit, or ends beyond the
            chain.
        """
        keeping, saving = self._keeping, self._saving
        needs = keeping.static + (in_flight - 1) * keeping.resting + keeping.running - capacity
        cannot = saving.static + (in_flight - 1) * saving.resting + saving.running > capacity
        bounds: Numbers = np.where(cannot | ~self._inside, np.inf, seconds)
        wanting = np.nonzero((needs > 0) & np.isfinite(bounds))
        if len(wanting[0]):
            starts = wanting[0]
            # With one micro-batch, what rests of a block counts only while those before it run.
            alone = in_flight == 1 and not self._streams
            stops = keeping.peaking[wanting] if alone else starts + wanting[1] + 1
            least = bounds[wanting]
            for weight in self._weights:
                price = self._table(in_flight, weight).least(starts, stops, needs[wanting])
                least = np.maximum(least, weight * bounds[wanting] + price)
            bounds[wanting] = least
        return bounds

    @cached_property
    def _inside(self) -> NDArray[np.bool_]:
        count = len(self._costs)
        inside: NDArray[np.bool_] = np.arange(count)[:, None] + np.arange(self._longest)[None] < count
        return inside

    @cached_property
    def _keeping(self) -> _Windows:
        costs = self._costs
        return _windows(costs.static, costs.saved, self._runs, self._longest)

    @cached_property
    def _saving(self) -> _Windows:
        """What rests where every block saves all that it can."""
        costs = self._costs
        kept = np.where(costs.recomputable, np.minimum(costs.kept, costs.saved), costs.saved)
        rests = np.where(costs.offloadable, np.minimum(costs.left, kept), kept)
        return _windows(costs.static - costs.streamable, rests, self._runs, self._longest)

    @cached_property
    def _runs(self) -> NDArray[np.int64]:
        costs = self._costs
        runs: NDArray[np.int64] = np.maximum(costs.forward_transient, costs.saved + costs.backward_transient)
        return runs

    @cached_property
    def _weights(self) -> tuple[float, ...]:
        """Weights of computing against copying: those at which blocks change from recomputing to offloading."""
        if not self._copies:
            return (1.0,)
        costs = self._costs
        freed = np.where(costs.recomputable, costs.saved - costs.kept, 0)
        computing = costs.forward_time[freed > 0] / freed[freed > 0]
        if not len(computing) or np.isinf(self._host_link):
            return (0.0, 0.5, 1.0)
        copying = 2 / self._host_link
        even = copying / (copying + np.quantile(computing, _QUANTILES))
        return tuple(sorted({0.0, 1.0, *even.tolist()}))

    def _table(self, in_flight: int, weight: float) -> _Table:
        # Where no weights stream, a byte saves as many bytes as there are micro-batches, for every block alike.
        key = (in_flight if self._streams else 1), weight
        if key not in self._tables:
            self._tables[key] = self._made(key[0], weight)
        table = self._tables[key]
        return table if self._streams else table.times(in_flight)

    def _made(self, in_flight: int, weight: float) -> _Table:
        count = len(self._costs)
        if in_flight not in self._options:
            self._options[in_flight] = [
                options_of(self._costs, block, in_flight, self._host_link) for block in range(count)
            ]
        return _table_of(steps_of(self._options[in_flight], [in_flight] * count, weight), count)


@dataclass(frozen=True)
class _Windows:
    """Bytes of all stages: that stay, that rest of one micro-batch, most beside those of others, and where that is."""

    static: NDArray[np.int64]
    resting: NDArray[np.int64]
    running: NDArray[np.int64]
    peaking: Indices


def _windows(static: NDArray[np.int64], rests: NDArray[np.int64], runs: NDArray[np.int64], longest: int) -> _Windows:
    before = np.cumsum(rests) - rests
    inside = _view(before + runs, longest) - before[:, None]
    highest = np.maximum.accumulate(inside, axis=1)
    rises = np.ones(inside.shape, dtype=bool)
    rises[:, 1:] = highest[:, 1:] > highest[:, :-1]
    blocks = np.arange(len(static))[:, None] + np.arange(longest)[None]
    return _Windows(
        np.cumsum(_view(static, longest), axis=1),
        np.cumsum(_view(rests, longest), axis=1),
        highest,
        np.maximum.accumulate(np.where(rises, blocks, 0), axis=1),
    )


def _view(column: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """The windows of a column, with nothing beyond its end."""
    padded = np.concatenate([column, np.zeros(longest, dtype=column.dtype)])
    return np.lib.stride_tricks.sliding_window_view(padded, longest)[: len(column)]


@dataclass(frozen=True)
class _Table:
    """Sums over the first steps, in the order of price per byte, and over the first blocks.

    Attributes:
        gains, prices: one row for each number of steps, one column for each number of blocks.
        ratios: price per byte of each step.
        factor: by which gains count.
    """

    gains: Numbers
    prices: Numbers
    ratios: Numbers
    factor: float = 1.0

    def times(self, factor: float) -> _Table:
        """The same where every byte counts so many times."""
        return _Table(self.gains, self.prices, self.ratios, factor)

    def least(self, starts: Indices, stops: Indices, needs: NDArray[np.int64]) -> Numbers:
        """Least price at which the blocks from `starts` to `stops` save what is needed; infinite where they cannot."""
        wanted = needs / self.factor
        rows, columns = self.gains.shape
        gains, prices = self.gains.reshape(-1), self.prices.reshape(-1)
        # The last row whose gain is below what is wanted.
        low, high = np.zeros(len(starts), dtype=np.int64), np.full(len(starts), rows, dtype=np.int64)
        for _ in range(int(rows).bit_length()):
            middle = (low + high) // 2
            at = middle * columns
            below = gains[at + stops] - gains[at + starts] < wanted
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        at = low * columns
        rest = wanted - (gains[at + stops] - gains[at + starts])
        ratios = np.append(self.ratios, np.inf)[low]
        found: Numbers = prices[at + stops] - prices[at + starts] + ratios * rest
        return found


def _table_of(steps: list[Step], blocks: int) -> _Table:
    gains, prices = np.zeros((len(steps) + 1, blocks + 1)), np.zeros((len(steps) + 1, blocks + 1))
    for row, step in enumerate(steps, start=1):
        gains[row, step.block + 1], prices[row, step.block + 1] = step.gain, step.price
    for table in (gains, prices):
        np.cumsum(table, axis=0, out=table)
        np.cumsum(table, axis=1, out=table)
    return _Table(gains, prices, np.array([step.ratio for step in steps]))
