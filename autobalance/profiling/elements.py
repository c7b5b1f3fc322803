"""What the tensors of a trial hold: fakes that need no memory, or real numbers copied to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autobalance.simulated.elements import MAX_KNOWN_ELEMENTS, fake_elements, fake_like, is_small, remember
from autobalance.simulated.tensor import SimulatedTensor


class Elements:
    """Makes the tensors of a trial; a context in which operations on them run.

    Args:
        kind: "fake" or "real".
        note: told of each scalar that was asked for and that only real elements know.
    """

    def __init__(self, kind: Literal["fake", "real"], note: Callable[[str], None]) -> None:
        self._note = note
        self._mode = FakeTensorMode() if kind == "fake" else None
        self._stack = ExitStack()

    def __enter__(self) -> Elements:
        if self._mode is not None:
            self._stack.enter_context(fake_elements(self._mode, self._note))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def on_device(self, tensor: Tensor, index: int, account: int) -> SimulatedTensor:
        """The trial's own tensor for one of the model's, on a simulated device.

        Args:
            tensor: real, on any device or on meta.
            index: of the simulated device.
            account: to which its storage is charged.
        """
        source = tensor.elements if isinstance(tensor, SimulatedTensor) else tensor
        if self._mode is None:
            return SimulatedTensor(_real_copy(source), index, account=account)
        elements = fake_like(source.detach())
        made = SimulatedTensor(elements, index, account=account)
        if source.device.type != "meta" and _holds_meaning(source):
            remember(made, elements, source.detach().cpu().clone())
        return made

    def on_host(self, tensor: Tensor) -> Tensor:
        """The trial's own tensor for one that stays on the host."""
        if self._mode is None or tensor.numel() <= MAX_KNOWN_ELEMENTS:
            return _real_copy(tensor)
        return fake_like(tensor.detach())  # too large to copy for nothing


def copy_elements(tensor: SimulatedTensor, account: int) -> SimulatedTensor:
    """A copy of a trial's tensor on the same device, charged to another account."""
    elements = tensor.elements.detach().clone()
    copied = SimulatedTensor(elements, tensor.index, account=account)
    if tensor.known is not None:
        remember(copied, elements, tensor.known.clone())
    return copied


def _holds_meaning(tensor: Tensor) -> bool:
    """Whether shapes or branches may depend on the tensor's numbers, and it is small enough to keep them."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and is_small(tensor)


def _real_copy(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    if detached.device.type == "meta":
        return torch.zeros_like(detached, device="cpu")
    return detached.cpu().clone()
