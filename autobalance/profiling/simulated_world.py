"""A trial on simulated devices whose elements are fakes that need no memory, or real numbers copied to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.kernels.emulation import as_assumed, emulating
from autobalance.kernels.target import Target
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.world import Kind, Observe, on_host
from autobalance.simulated import backend, dispatch, installation
from autobalance.simulated.configure import simulate
from autobalance.simulated.elements import MAX_KNOWN_ELEMENTS, fake_elements, fake_like, is_small, reading, remember
from autobalance.simulated.fakes import known_of
from autobalance.simulated.ledger import using_ledger
from autobalance.simulated.tensor import SimulatedTensor

_READ = torch.ops.aten._local_scalar_dense.default


class SimulatedWorld:
    """Simulated devices; those that are configured stay as they are.

    Args:
        kind: "fake" or "real" elements.
        target: whose kernels are chosen; real elements know only those of simulated devices.
        devices: how many devices the trial needs.
        tracer: is told of every storage.
        note: told of each number that only real elements know.
        observe: called after each operation.
    """

    def __init__(
        self,
        kind: Kind,
        target: Target,
        devices: int,
        tracer: Tracer,
        note: Callable[[str], None],
        observe: Observe,
    ) -> None:
        installation.install()
        self.devices: Sequence[torch.device] = [torch.device(backend.NAME, index) for index in range(devices)]
        self._target = target
        self._count = devices
        self._tracer = tracer
        self._note = note
        self._observe = observe
        self._mode = compat.make_fake_mode() if kind == "fake" else None
        self._stack = ExitStack()

    def __enter__(self) -> SimulatedWorld:
        with ExitStack() as entering:
            enough = backend.device_count() >= self._count
            entering.enter_context(nullcontext() if enough else simulate(self._count))
            entering.enter_context(using_ledger(self._tracer))
            entering.enter_context(compat.as_written())
            if self._mode is not None:
                entering.enter_context(fake_elements(self._mode, self._note))
                target = self._target
                kernels = emulating(target, "PrivateUse1") if target.is_emulated else as_assumed(target)
                entering.enter_context(kernels)
            entering.enter_context(dispatch.observing(self._observe))
            entering.enter_context(reading(lambda: self._observe(_READ, (), {}, None, None)))
            self._stack = entering.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def on_device(self, tensor: Tensor, index: int, account: int) -> Tensor:
        """The trial's own tensor for one of the model's, real, simulated or on meta."""
        source = tensor.elements if isinstance(tensor, SimulatedTensor) else tensor
        if self._mode is None:
            return SimulatedTensor(on_host(source), index, account=account)
        elements = fake_like(_as_copied(source))
        made = SimulatedTensor(elements, index, account=account)
        if source.device.type != "meta" and _holds_meaning(source):
            remember(made, elements, source.detach().cpu().clone())
        return made

    def on_host(self, tensor: Tensor) -> Tensor:
        """The trial's own tensor for one that stays on the host."""
        if self._mode is None or tensor.numel() <= MAX_KNOWN_ELEMENTS:
            return on_host(tensor)
        return fake_like(_as_copied(tensor))  # too large to copy for nothing

    def account_of(self, tensor: Tensor) -> int | None:
        """The account of a simulated tensor."""
        return tensor.account if isinstance(tensor, SimulatedTensor) and tensor.index is not None else None

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor, None where they are not known."""
        return known_of(tensor)

    def copied(self, tensor: Tensor, account: int) -> Tensor:
        """A copy on the same device, charged to another account."""
        assert isinstance(tensor, SimulatedTensor)
        elements = tensor.elements.detach().clone()
        copied = SimulatedTensor(elements, tensor.index, account=account)
        if tensor.known is not None:
            remember(copied, elements, tensor.known.clone())
        return copied

    def charging(self, account: int | None) -> AbstractContextManager[None]:
        """Charge what is made from nothing to an account."""
        return dispatch.charging(account)

    @property
    def current_account(self) -> int | None:
        """To whom it is charged what is made from nothing."""
        return dispatch.current_account


def _as_copied(tensor: Tensor) -> Tensor:
    """Sizes and strides of a copy on another device: that of a view with gaps is contiguous."""
    return torch.empty_like(tensor.detach(), device="meta")


def _holds_meaning(tensor: Tensor) -> bool:
    """Whether shapes or branches may depend on the tensor's numbers, and it is small enough to keep them."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and is_small(tensor)
