"""Memory that kernels take inside, beside their operands and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autobalance.kernels.target import Target


@dataclass(frozen=True)
class Taken:
    """What one operation takes beside its operands and results.

    Attributes:
        transient: bytes alive only inside the kernel.
        workspaces: (name, bytes) of what the device keeps from then on; each name once a device.
    """

    transient: int = 0
    workspaces: tuple[tuple[str, int], ...] = ()


NOTHING = Taken()


def taken_inside(func: Any, args: Any, kwargs: Any, result: Any, target: Target) -> Taken:
    """Scratch of one operation.

    Args:
        func: operator overload.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: what it returned.
        target: whose kernels.
    """
    return NOTHING
