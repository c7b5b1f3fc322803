"""Tables of stages whose blocks may save memory where they do not fit otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.chains.stage_memory import StageMemory
from autobalance.partitioning.chains.sweep import Path
from autobalance.partitioning.chains.tables import Table, Tables
from autobalance.partitioning.savings.choice import Choice
from autobalance.partitioning.savings.saver import Saver, Stage

# Stages of a path, those that take most of it, among which one is looked for that can do with less host memory.
_MOST_TRIALS = 4


@dataclass
class SavingTables(Tables):
    """Uses and seconds of stages that save no more than they have to.

    A stage that fits as it is costs what `Tables` says. One that does not fills its budget, and takes what the cheapest
    way to save takes: a lower bound until its choice is known.

    Attributes:
        savers: for every kind.
        without_state: peaks of the stages where the optimizer's storages are on the host, given when they are needed;
            None: the rows tell what state leaves.
        per_byte: seconds that a byte over the host link counts on top of the time.
        is_loose: whether stages whose choices are not proved take no more than is proved of them.
    """

    savers: Sequence[Saver] = ()
    without_state: Callable[[], StageMemory] | None = None
    per_byte: float = 0.0
    is_loose: bool = False
    _saved_uses: dict[tuple[int, int], Table] = field(default_factory=dict, repr=False)
    _saved_times: dict[tuple[int, int], Table] = field(default_factory=dict, repr=False)

    def use(self, kind: int, left: int) -> Table:
        """Peak / budget; 1 where the stage has to save, infinite where even that is not enough."""
        held = self.in_flight(left)
        if (kind, held) not in self._saved_uses:
            saves = self._over(kind, left) & np.isfinite(self.time(kind, left)).any(axis=0)
            self._saved_uses[kind, held] = np.where(saves, 1.0, super().use(kind, left))
        return self._saved_uses[kind, held]

    def time(self, kind: int, left: int) -> Table:
        """Seconds of a stage, with what saving costs."""
        held = self.in_flight(left)
        if (kind, held) not in self._saved_times:
            over = self._over(kind, left)
            times = self.savers[kind].seconds(held, self.plain_time(kind), over, loose=self.is_loose)
            self._saved_times[kind, held] = times + self.per_byte * self._moved(kind, left) if self.per_byte else times
        return self._saved_times[kind, held]

    def choose(self, path: Path, *, program: bool = False) -> bool:
        """Find the true choices of the stages of a path that have to save.

        Args:
            path: stages.
            program: whether a solver may prove those that are known but not proved.

        Returns:
            Whether any was not known before, so that the tables changed.
        """
        new = [self._choose(path, number, program=program) for number in self._saving(path)]
        return any(new)

    @property
    def proved(self) -> bool:
        """Whether no stage whose choice is known has a faster one."""
        return all(saver.proved for saver in self.savers)

    def loosened(self) -> SavingTables:
        """The same tables with lower bounds of the seconds of stages whose choices are not proved."""
        return replace(self, is_loose=True, fastest={}, _saved_times={}, _by_length={})

    def priced(self, per_byte: float) -> SavingTables:
        """The same tables, in which bytes over the host link have a price in seconds.

        Args:
            per_byte: seconds.
        """
        return replace(self, per_byte=per_byte, fastest={}, _saved_times={}, _by_length={})

    def moved(self, path: Path) -> int:
        """Bytes that the stages of a path, whose choices are known, copy to and from the host for each micro-batch.

        Args:
            path: the stages.
        """
        return sum(choice.carried for choice in self.choices(path) if choice is not None)

    def pinned(self, path: Path) -> int:
        """Bytes of host memory that the stages of a path take, whose choices are known.

        Args:
            path: the stages.
        """
        return sum(choice.pinned for choice in self.choices(path) if choice is not None)

    def tighten(self, path: Path, most: int) -> None:
        """Choose again for stages of a path that take more host memory than there is.

        The one whose time grows least goes without what is too much; where none can do without all of that, each gets
        its share of what there is.

        Args:
            path: stages, whose choices are known.
            most: bytes of host memory for all of them.
        """
        known = dict(enumerate(self.choices(path)))
        pinned = {number: choice.pinned for number, choice in known.items() if choice is not None and choice.pinned}
        total = sum(pinned.values())
        trials: dict[int, float] = {}
        for number in sorted(pinned, key=pinned.__getitem__, reverse=True)[:_MOST_TRIALS]:
            if pinned[number] + most >= total:
                was = self._limit(path, number, pinned[number] + most - total)
                now = self.choices(path)[number]
                choice = known[number]
                if now is not None and choice is not None:
                    trials[number] = now.seconds - choice.seconds
                self._limit(path, number, was)
        if trials:
            least = min(trials, key=trials.__getitem__)
            self._limit(path, least, pinned[least] + most - total)
            return
        for number, size in pinned.items():
            self._limit(path, number, size * most // total)

    def _limit(self, path: Path, number: int, most: int | None) -> int | None:
        """Limit the host memory of one stage, and say what limited it before."""
        kind, start, stop = path[number]
        before = self.savers[kind].limit_host((self.in_flight(len(path) - number), start, stop), most)
        self._choose(path, number)
        return before

    def _saving(self, path: Path) -> list[int]:
        """Stages of a path that have to save."""
        return [
            number
            for number, (kind, start, stop) in enumerate(path)
            if self._over(kind, len(path) - number)[start, stop - start - 1]
        ]

    def _choose(self, path: Path, number: int, *, program: bool = False) -> bool:
        """Find the true choice of a stage; whether it was not known."""
        (kind, start, stop), held = path[number], self.in_flight(len(path) - number)
        before = path[number - 1][0] if number else -1
        at, plain = (start, stop - start - 1), self.plain_time(kind)
        seconds = float(plain[before if len(plain) > 1 else 0][at])
        peak = int(self.peaks(kind, held)[at]) + self.kinds[kind].excess
        less = self._peak_without_state(kind, (held, start, stop), peak)
        is_new = self.savers[kind].choose((held, start, stop), seconds, peak, less, program=program)
        if is_new:
            self.fastest.clear()
            self._saved_times.pop((kind, held), None)
            self._saved_uses.pop((kind, held), None)
        return is_new

    def choices(self, path: Path) -> list[Choice | None]:
        """What each stage of a path does to fit; None where it keeps all.

        Args:
            path: the stages.
        """
        found = []
        for number, (kind, start, stop) in enumerate(path):
            left = len(path) - number
            stage = self.in_flight(left), start, stop
            over = self._over(kind, left)[start, stop - start - 1]
            found.append(self.savers[kind].choices.get(stage) if over else None)
        return found

    def _peak_without_state(self, kind: int, stage: Stage, peak: int) -> int:
        here, (held, start, stop) = self.kinds[kind], stage
        steps = self.savers[kind].on_host
        if steps is None:
            return peak
        if self.without_state is None:
            return peak - steps.freed(start, stop)
        found = self.without_state().banded(here.items, held, self.width)
        return int(found[start, stop - start - 1]) + here.excess

    def _moved(self, kind: int, left: int) -> Table:
        """Bytes over the host link of every stage; where its choice is not known, twice those that are too much."""
        held, budget = self.in_flight(left), self.kinds[kind].budget - self.kinds[kind].excess
        over = self._over(kind, left)
        # Every micro-batch in flight saves a byte for each that is copied there and back.
        moved: Table = np.where(over, np.maximum(0, self.peaks(kind, held) - budget) * (2 / held), 0.0)
        for (count, start, stop), choice in self.savers[kind].choices.items():
            if count == held and choice is not None and stop - start <= self.width and over[start, stop - start - 1]:
                moved[start, stop - start - 1] = choice.carried
        return moved

    def _over(self, kind: int, left: int) -> NDArray[np.bool_]:
        over: NDArray[np.bool_] = self.allowed(kind) & ~np.isfinite(super().use(kind, left))
        return over
