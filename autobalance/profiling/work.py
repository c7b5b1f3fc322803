"""How long each block works, by the roofline: the slower of its arithmetic and its memory traffic, plus the launches.

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for multicore architectures", CACM
2009.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autobalance import compat

LAUNCH_TIME = 5e-6  # seconds per kernel; a CUDA launch takes 3 to 10 microseconds from Python


@dataclass
class Work:
    """What one block does in one direction.

    Attributes:
        flops: floating-point operations.
        traffic: bytes read and written.
        launches: kernels.
    """

    flops: int = 0
    traffic: int = 0
    launches: int = 0

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Time on a device with these rates."""
        return max(self.flops / flops_per_second, self.traffic / bytes_per_second) + self.launches * LAUNCH_TIME


class WorkCounter:
    """Observes operations and adds up each account's work, forward and backward.

    Example:
        >>> counter = WorkCounter()
        >>> with observing(counter): ...            # doctest: +SKIP
        >>> counter.forward[0].flops                # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.forward: dict[int, Work] = defaultdict(Work)
        self.backward: dict[int, Work] = defaultdict(Work)

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any, account: int | None) -> None:
        """Count one operation."""
        if account is None or getattr(func, "is_view", False):
            return
        work = (self.backward if compat.in_backward() else self.forward)[account]
        work.flops += compat.flops_of(func, args, kwargs, result)
        work.traffic += _bytes(args) + _bytes(result)
        work.launches += 1


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return 0
