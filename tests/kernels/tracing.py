"""Runs a few operations in a trace for a target and tells what they left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autobalance.kernels.scratch import Taken, taken_inside
from autobalance.kernels.target import find_target
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.world import make_world

DEVICE = "simulated:0"


@dataclass
class Seen:
    """Operations of a trace in their order, what each took inside, and the bytes of storages that the result keeps."""

    names: list[str] = field(default_factory=list)
    taken: dict[str, Taken] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)


def operand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the device that wants a gradient."""
    return torch.empty(*shape, dtype=dtype, device=DEVICE, requires_grad=True)


def trace(target: str, run: Callable[[], Tensor], backward: bool = True) -> Seen:
    """Trace `run` and the backward from its result.

    Args:
        target: whose kernels.
        run: makes its operands itself.
        backward: False: forward only; what is kept is counted while the result lives.
    """
    tracer, seen, kernels = Tracer(), Seen(), find_target(target)

    def observe(func: Any, args: Any, kwargs: Any, result: Any, account: int | None) -> None:
        name = func.__name__.partition(".")[0]
        seen.names.append(name)
        seen.taken[name] = taken_inside(func, args, kwargs, result, kernels)

    with make_world("fake", kernels, 1, tracer, lambda note: None, observe):
        result = run()
        seen.kept = _alive(tracer)
        if backward:
            result.backward(torch.empty_like(result))
    return seen


def _alive(tracer: Tracer) -> list[int]:
    dead = {-event - 1 for event in tracer.events if event < 0}
    return [nbytes for index, nbytes in enumerate(tracer.nbytes) if index not in dead]
