"""Tables of stages whose blocks may save memory where they do not fit otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.knapsack import Choice
from autobalance.partitioning.saver import Saver, Stage
from autobalance.partitioning.stage_memory import StageMemory
from autobalance.partitioning.sweep import Path
from autobalance.partitioning.tables import Table, Tables


@dataclass
class SavingTables(Tables):
    """Uses and seconds of stages that save no more than they have to.

    A stage that fits as it is costs what `Tables` says. One that does not fills its budget, and takes what the cheapest
    way to save takes: a lower bound until its choice is known.

    Attributes:
        savers: for every kind.
        without_state: peaks of the stages where the optimizer's storages are on the host, given when they are needed;
            None: the rows tell what state leaves.
    """

    savers: Sequence[Saver] = ()
    without_state: Callable[[], StageMemory] | None = None
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
            self._saved_times[kind, held] = self.savers[kind].seconds(held, self.plain_time(kind), over)
        return self._saved_times[kind, held]

    def choose(self, path: Path) -> bool:
        """Find the true choices of the stages of a path that have to save.

        Args:
            path: stages.

        Returns:
            Whether any was not known before, so that the tables changed.
        """
        is_new, before = False, -1
        for number, (kind, start, stop) in enumerate(path):
            left, at = len(path) - number, (start, stop - start - 1)
            if self._over(kind, left)[at]:
                held = self.in_flight(left)
                plain = self.plain_time(kind)
                seconds = float(plain[before if len(plain) > 1 else 0][at])
                peak = int(self.peaks(kind, held)[at]) + self.kinds[kind].excess
                less = self._peak_without_state(kind, (held, start, stop), peak)
                if self.savers[kind].choose((held, start, stop), seconds, peak, less):
                    is_new = True
                    self._saved_times.pop((kind, held), None)
                    self._saved_uses.pop((kind, held), None)
            before = kind
        return is_new

    def choices(self, path: Path) -> list[Choice | None]:
        """What each stage of a path does to fit; None where it keeps all."""
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

    def _over(self, kind: int, left: int) -> NDArray[np.bool_]:
        over: NDArray[np.bool_] = self.allowed(kind) & ~np.isfinite(super().use(kind, left))
        return over
