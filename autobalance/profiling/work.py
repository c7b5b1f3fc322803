"""What each account computes in a trace, added up by kind of arithmetic and intensity."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from autobalance import compat
from autobalance.devices.roofline import Work

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
        if account is None or getattr(func, "is_view", False):
            return
        phase: Phase = "backward" if compat.in_backward() else "optimizer" if self.optimizing else "forward"
        flops = compat.flops_of(func, args, kwargs, result)
        traffic = _bytes(args) + _bytes(result)
        self.add(phase, account, [Work(_arithmetic(func, args) if flops else "", flops, traffic, 1)])

    def add(self, phase: Phase, account: int, work: Iterable[Work]) -> None:
        """Count work that somebody else has seen, such as that of a block which ran by itself."""
        for part in work:
            intensity = round(math.log2(part.flops / part.traffic)) if part.flops and part.traffic else 0
            sums = self._sums[phase, account].setdefault((part.arithmetic, intensity), [0, 0, 0])
            sums[0] += part.flops
            sums[1] += part.traffic
            sums[2] += part.launches

    def work(self, phase: Phase, account: int) -> tuple[Work, ...]:
        """What an account did in one phase, over all steps."""
        sums = self._sums.get((phase, account), {})
        return tuple(Work(arithmetic, *sums[arithmetic, intensity]) for arithmetic, intensity in sorted(sums))


def _arithmetic(func: Any, args: Any) -> str:
    """The kind of arithmetic of a matrix product or convolution; CUDA rounds float32 to tf32 where the user lets it."""
    dtype = next((dtype for value in args if (dtype := _dtype(value)) is not None), torch.float32)
    name = str(dtype).removeprefix("torch.")
    if dtype is torch.float32:
        convolution = "conv" in func.__name__
        backends: Any = torch.backends  # torch declares no types for the settings of operators
        setting = backends.cudnn.conv if convolution else backends.cuda.matmul
        return "tf32" if setting.fp32_precision == "tf32" else name
    return name


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.dtype
    if isinstance(value, (list, tuple)):
        return next((dtype for item in value if (dtype := _dtype(item)) is not None), None)
    return None


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return 0
