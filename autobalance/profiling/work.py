"""What each account computes in a trace, added up by kind of arithmetic and intensity."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

from autobalance import compat
from autobalance.devices.roofline import Work
from autobalance.simulated.work import work_of

Phase = Literal["forward", "backward", "optimizer"]


class WorkCounter:
    """Observes operations and adds up each account's work by phase.

    A roofline is bent: the time of a sum is not the sum of times. Operations are therefore added up only with others
    of about the same ratio of arithmetic to traffic, within a factor of two.

    Example:
        >>> counter = WorkCounter()
        >>> with observing(counter): ...            # doctest: +SKIP
        >>> counter.work("forward", account=0)      # doctest: +SKIP

    Attributes:
        optimizing: set while optimizers step, whose operations belong to no forward.
    """

    def __init__(self) -> None:
        self.optimizing = False
        self._sums: dict[tuple[Phase, int], dict[tuple[str, int], list[int]]] = defaultdict(dict)

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any, account: int | None) -> None:
        """Count one operation."""
        work = None if account is None else work_of(func, args, kwargs, result)
        if account is None or work is None:
            return
        phase: Phase = "backward" if compat.in_backward() else "optimizer" if self.optimizing else "forward"
        self.add(phase, account, [work])

    def add(self, phase: Phase, account: int, work: Iterable[Work]) -> None:
        """Count work that somebody else has seen, such as that of a block which ran by itself.

        Args:
            phase: in which it was done.
            account: whose it is.
            work: of the operations.
        """
        for part in work:
            intensity = round(math.log2(part.flops / part.traffic)) if part.flops and part.traffic else 0
            sums = self._sums[phase, account].setdefault((part.arithmetic, intensity), [0, 0, 0])
            sums[0] += part.flops
            sums[1] += part.traffic
            sums[2] += part.launches

    def work(self, phase: Phase, account: int) -> tuple[Work, ...]:
        """What an account did in one phase, over all steps.

        Args:
            phase: of a step.
            account: whose work.
        """
        sums = self._sums.get((phase, account), {})
        return tuple(Work(arithmetic, *sums[arithmetic, intensity]) for arithmetic, intensity in sorted(sums))
