"""Optimizers that cannot step without numbers, such as those of 8 bits: two parameters of each shape step for real.

They are taken to go from one parameter to the next, as such optimizers do.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from autobalance.kernels.target import Target
from autobalance.measuring.meters import Meter, meter_for
from autobalance.profiling.sandbox import random_state_kept


@dataclass(frozen=True)
class _Taken:
    """What a step takes for one parameter: bytes of its state, and bytes inside the first step and a later one."""

    state: int
    first: int
    later: int


class OpaqueOptimizers:
    """Finds the optimizers that cannot be traced, measures them, and stands for their steps in the next trace.

    Args:
        target: whose kernels the trace chooses.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._reasons: dict[type, str] = {}
        self._measured: dict[Hashable, _Taken] = {}
        self._failed: torch.optim.Optimizer | None = None
        self._device = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Which optimizers were measured, and why, in words."""
        return tuple(
            f"{cls.__name__} cannot step on tensors without numbers ({reason}): its bytes were measured on "
            f"{self._device} with parameters of each shape; the rest is traced"
            for cls, reason in self._reasons.items()
        )

    def install(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Stand for the steps of optimizers of a trace that are known as opaque, and watch those of the others.

        Args:
            optimizers: of the copy.
        """
        self._failed = None
        for optimizer in optimizers:
            step = partial(_step, self, optimizer.step)
            # A method, for schedulers look for what they can wrap.
            optimizer.step = MethodType(_called_by(step), optimizer)  # type: ignore[method-assign]

    def step(self, optimizer: torch.optim.Optimizer, step: Any, args: Any, kwargs: Any) -> Any:
        """One step in a trace."""
        if type(optimizer) in self._reasons:
            return self._substitute(optimizer, *args, **kwargs)
        entered = self._failed
        try:
            return step(*args, **kwargs)
        except Exception:
            self._failed = entered or optimizer
            raise

    @torch.no_grad()
    def _substitute(self, optimizer: torch.optim.Optimizer, closure: Any = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, parameter in _trained(optimizer):
            taken = self._measured.get(_key(optimizer, group, parameter))
            if taken is None:
                self._failed = optimizer
                raise RuntimeError(f"{type(optimizer).__name__} was not measured with a parameter of this shape")
            state = optimizer.state[parameter]
            inside = taken.later if state else taken.first
            if not state:
                state["measured"] = parameter.new_empty(taken.state, dtype=torch.uint8)
            parameter.new_empty(inside, dtype=torch.uint8)
        return loss

    def learn(self, reason: str) -> bool:
        """Measure the optimizer at whose step a trace has ended.

        Args:
            reason: what it has ended with, in words.

        Returns:
            Whether another trace will come further.
        """
        failed, self._failed = self._failed, None
        if failed is None:
            return False
        lacking = {
            key: (group, parameter)
            for group, parameter in _trained(failed)
            if (key := _key(failed, group, parameter)) not in self._measured
        }
        try:
            with meter_for(self._target) as meter, random_state_kept():
                found = {key: _measured(failed, *pair, meter) for key, pair in lacking.items()}
                self._device = str(meter.device)
        except Exception:  # it does not step with numbers either, and the whole step will say so
            return False
        self._measured.update(found)
        self._reasons.setdefault(type(failed), reason)
        return bool(found)


def _step(
    opaque: OpaqueOptimizers, step: Any, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Any
) -> Any:
    return opaque.step(optimizer, step, args, kwargs)


def _called_by(step: Any) -> Any:
    def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(optimizer, args, kwargs)

    return call


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Mapping[str, Any], Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


def _key(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Hashable:
    settings = tuple(
        (name, value) for name, value in group.items() if isinstance(value, (bool, int, float, str, tuple, type(None)))
    )
    return type(optimizer), settings, tuple(parameter.shape), parameter.dtype


def _measured(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor, meter: Meter) -> _Taken:
    """Two steps of the same optimizer on parameters with numbers.

    There are two of them, for a loop still holds what it has made for one while it works on the next.
    """
    with meter.watching():
        numbers = [torch.randn(tuple(like.shape), dtype=like.dtype, device=meter.device) for _ in range(2)]
        parameters = [nn.Parameter(each) for each in numbers]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        real = copy.copy(optimizer)
        vars(real).pop("step", None)  # that of the trace
        real.param_groups = [{**group, "params": parameters}]
        real.state = defaultdict(dict)
        before = meter.allocated()
        inside = []
        for _ in range(2):
            meter.reset()
            real.step()
            inside.append(meter.peak() - meter.allocated())
        return _Taken((meter.allocated() - before) // len(parameters), *inside)
