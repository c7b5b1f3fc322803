"""Ways for the last blocks of a stage to save memory, side by side, and which of them can be forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.savings.saving_options import Option

Numbers = NDArray[np.float64]

ROUNDING = 1e-12
"""Times that differ by no more than this share are one: sums of floating point numbers depend on their order."""
_CHUNK = 256


@dataclass(frozen=True)
class Ways:
    """What ways for the last blocks mean for those before them: one entry for each way.

    Example:
        >>> Ways.start().before(option, in_flight=4).taken()

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
    def start(cls) -> Ways:
        """No block is decided."""
        return cls(*(np.zeros(1) for _ in range(7)))

    @classmethod
    def joined(cls, parts: Sequence[Ways]) -> Ways:
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

    def at(self, ways: NDArray[np.int64]) -> Ways:
        """Some of the ways."""
        return Ways(*(column[ways] for column in self._columns))

    def taken(self) -> Numbers:
        """Bytes beside what stays, without undecided blocks."""
        bytes_taken: Numbers = self.total + self.highest + self.staging
        return bytes_taken

    def before(self, option: Option, in_flight: int) -> Ways:
        """The same ways with one more block before them."""
        staged = option.staged
        return Ways(
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


def _surpassed(one: Numbers, other: Numbers) -> NDArray[np.bool_]:
    """Entry `[i, j]`: whether point `i` of the first is nowhere above point `j` of the second."""
    below: NDArray[np.bool_] = one[0][:, None] <= other[0][None] * (1 + ROUNDING)
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        below &= mine[:, None] <= theirs[None]
    return below


class OneWay:
    """A way for all blocks of a stage, of which one block after the other is changed.

    Example:
        >>> way = OneWay([options[0] for options in all_options], in_flight=4)
        >>> way.put(3, all_options[3][1])
        >>> way.taken()

    Args:
        options: of every block.
        in_flight: micro-batches.
    """

    def __init__(self, options: Sequence[Option], in_flight: int) -> None:
        self.options = list(options)
        self._in_flight = in_flight
        self._rests = np.array([option.rests for option in options])
        self._runs = np.array([option.runs for option in options])
        self._streaming: dict[int, Option] = {block: option for block, option in enumerate(options) if option.streams}

    def put(self, block: int, option: Option) -> None:
        """Give a block another option."""
        self.options[block] = option
        self._rests[block], self._runs[block] = option.rests, option.runs
        self._streaming.pop(block, None)
        if option.streams:
            self._streaming[block] = option

    def taken(self) -> float:
        """Bytes beside what stays."""
        rests = self._rests
        total = (self._in_flight - 1) * float(rests.sum()) + float((np.cumsum(rests) - rests + self._runs).max())
        staged = [self._streaming[block].staged for block in sorted(self._streaming)]
        staging = max((one + other for one, other in zip(staged, [*staged, 0.0][1:], strict=True)), default=0.0)
        return total + staging - sum(option.leaves for option in self._streaming.values())

    def pinned(self) -> float:
        """Bytes of host memory."""
        return sum(option.pinned for option in self.options)
