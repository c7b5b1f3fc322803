"""On which device an operation runs, and whether its operands may meet there."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from autobalance.simulated import backend
from autobalance.simulated.operation import Operation
from autobalance.simulated.tensor import SimulatedTensor


class Operands:
    """The arguments of one operation.

    Args:
        operation: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Attributes:
        first: the first simulated tensor among them, whose account the results inherit.
        index: of the device on which the results belong; None: the host.
        elementwise: the first list, for operations that work on lists element by element.

    Raises:
        RuntimeError: tensors are on different devices.
    """

    __slots__ = ("_host", "_operation", "_stranger", "elementwise", "first", "index")

    def __init__(self, operation: Operation, args: Any, kwargs: Any) -> None:
        self.first: SimulatedTensor | None = None
        self.index: int | None = None
        self.elementwise: Any = None
        self._operation = operation
        self._stranger: torch.Tensor | None = None
        self._host: torch.Tensor | None = None
        host_is_welcome = operation.moves or operation.reads_host
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                self._see(value, host_is_welcome)
            elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
                self._see_list(value)
        self._check()
        where = kwargs.get("device")
        if where is not None:
            self.index = backend.index_of(where) if where.type == backend.NAME else None

    def _check(self) -> None:
        stranger = self._stranger if self._stranger is not None else self._host
        if stranger is not None and self.first is not None and self.first.index is not None:
            self._refuse(self.first.device, stranger.device)

    def _see(self, value: torch.Tensor, host_is_welcome: bool) -> None:
        """Take one tensor into account; as on CUDA, a scalar of the host may join any device."""
        wrapper = value if isinstance(value, SimulatedTensor) else None
        index = None if wrapper is None else wrapper.index
        if index is None:
            if self.first is None:
                self.first = wrapper
            if not host_is_welcome and value.dim() > 0:
                self._host = value
        elif self.index is None:
            self.first, self.index = wrapper, index
        elif index != self.index and not self._operation.moves:
            self._stranger = value

    def _see_list(self, items: Any) -> None:
        if not self._operation.by_element:
            for item in items:
                if isinstance(item, torch.Tensor):
                    self._see(item, self._operation.indexed)
        elif self.elementwise is None:
            self.elementwise = items
            for item in items:
                if isinstance(item, SimulatedTensor):
                    self.first, self.index = item, item.index
                    break
        else:
            for one, other in zip(self.elementwise, items, strict=False):
                if isinstance(other, torch.Tensor) and other.dim() > 0 and other.device != one.device:
                    self._refuse(one.device, other.device)

    def _refuse(self, one: torch.device, other: torch.device) -> NoReturn:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}! "
            f"(when checking the arguments of {self._operation.name})"
        )
