"""Tracing with fake tensors of the CPU or of CUDA, or with real ones on the CPU, watched operation by operation.

Simulated devices take torch's one free device type, which a process that uses CUDA must not; there fake tensors say
themselves that they are on `cuda:N`. On the CPU they need say nothing else, and torch chooses the kernels itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.kernels import cpu
from autobalance.kernels.emulation import emulating
from autobalance.kernels.target import Target
from autobalance.profiling.known_values import KnownValues
from autobalance.profiling.operands import operands_in
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.world import Kind, Observe, on_host
from autobalance.simulated.elements import is_small
from autobalance.simulated.results import AS_ON_CUDA


class Watch(compat.DispatchMode):
    """Tells a tracer of every storage that an operation makes on a device of one type.

    A new storage is charged to whom the operation's first operand on that device is charged, element by element for
    operations on lists; one that is made from nothing to `current_account`, or to its device.

    Args:
        tracer: is told.
        account_of: account by device; tensors on other devices are not told of.
        observe: called after each operation.
        carry_out: carries an operation out, given its arguments.
    """

    def __init__(
        self,
        tracer: Tracer,
        account_of: Mapping[torch.device, int],
        observe: Observe,
        carry_out: Callable[[Any, Any, Any], Any],
    ) -> None:
        super().__init__()
        self._tracer = tracer
        self._account_of = account_of
        self._observe = observe
        self._carry_out = carry_out
        self.current_account: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._carry_out(func, args, kwargs)
        if isinstance(result, Tensor):
            account = self._charge(result, operands_in((args, kwargs)))
        elif isinstance(result, (list, tuple)) and any(isinstance(item, Tensor) for item in result):
            account = self._charge_all(func, result, args, kwargs)
        elif func is torch.ops.aten._local_scalar_dense.default:
            account = self.account(args[0])
        else:
            return result
        self._observe(func, args, kwargs, result, account)
        return result

    def _charge(self, made: Tensor, operands: Iterator[Tensor]) -> int | None:
        if made.device not in self._account_of:
            return None
        if made.layout is not torch.strided:
            raise RuntimeError(f"a tensor of layout {made.layout} is not traced; build embeddings with sparse=False")
        storage = made.untyped_storage()
        account = next(
            (
                known
                for operand in operands
                if operand.device == made.device and (known := self.account(operand)) is not None
            ),
            self._account_of[made.device] if self.current_account is None else self.current_account,
        )
        self._tracer.allocate(storage, storage.nbytes(), account)
        return account

    def _charge_all(self, func: Any, results: Sequence[Any], args: Any, kwargs: Any) -> int | None:
        by_element = func.__name__.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        account = None
        for index, item in enumerate(results):
            if isinstance(item, Tensor):
                operand = args[0][index] if by_element and index < len(args[0]) else (args, kwargs)
                account = self._charge(item, operands_in(operand))
            elif isinstance(item, (list, tuple)):
                account = self._charge_all(func, item, args, kwargs)
        return account

    def account(self, tensor: Tensor) -> int | None:
        """To whom the storage of `tensor` is charged; None if it is not on a watched device."""
        index = self._tracer.find(tensor.untyped_storage())
        return None if index is None else self._tracer.accounts[index]


class WatchedWorld:
    """Makes the tensors of a trial on watched devices; a context in which its operations run.

    Args:
        kind: "fake": fakes on the devices themselves; "real": real tensors on the CPU.
        target: whose kernels are chosen.
        devices: in the order of their accounts.
        tracer: is told of every storage.
        note: told of each number that only real elements know.
        observe: called after each operation.
    """

    def __init__(
        self,
        kind: Kind,
        target: Target,
        devices: Sequence[torch.device],
        tracer: Tracer,
        note: Callable[[str], None],
        observe: Observe,
    ) -> None:
        self.devices: Sequence[torch.device] = list(devices)
        self._target = target
        self._tracer = tracer
        self._mode = compat.make_fake_mode(allow_non_fake_inputs=True) if kind == "fake" else None
        self._known = KnownValues(self._mode, note) if self._mode is not None else None
        accounts = {device: account for account, device in enumerate(devices)}
        carry_out = cpu.carry_out if target.kind == "cpu" else _as_on_cuda
        self._watch = Watch(tracer, accounts, observe, carry_out if kind == "fake" else _as_it_is)
        self._stack = ExitStack()

    def __enter__(self) -> WatchedWorld:
        self._stack.enter_context(compat.as_written())
        if self._mode is not None and self._known is not None:
            self._stack.enter_context(compat.foreach_on_fakes())
            self._stack.enter_context(compat.unseen_by_transformers())
            if self._target.is_emulated:
                self._stack.enter_context(emulating(self._target, "CUDA"))
            self._stack.enter_context(self._mode)
            self._stack.enter_context(self._known)
        self._stack.enter_context(self._watch)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def account_of(self, tensor: Tensor) -> int | None:
        """To whom the storage of `tensor` is charged; None if it is not on a watched device."""
        return self._watch.account(tensor)

    @property
    def current_account(self) -> int | None:
        """To whom it is charged what is made from nothing."""
        return self._watch.current_account

    @contextmanager
    def charging(self, account: int | None) -> Iterator[None]:
        """Charge what is made from nothing to `account`."""
        before, self._watch.current_account = self._watch.current_account, account
        try:
            yield
        finally:
            self._watch.current_account = before

    def on_device(self, tensor: Tensor, index: int, account: int) -> Tensor:
        """The trial's own tensor for one of the model's.

        Args:
            tensor: real, on any device or on meta.
            index: of its device in the trial.
            account: to whom it is charged.
        """
        with compat.modes_disabled():  # what is made here is charged to `account`, not to whoever is current
            source = tensor.detach()
            made = on_host(source) if self._mode is None else self._fake_like(source, self.devices[index])
            self._tracer.allocate(made.untyped_storage(), made.untyped_storage().nbytes(), account)
        return made

    def _fake_like(self, source: Tensor, device: torch.device) -> Tensor:
        assert self._mode is not None
        assert self._known is not None
        with self._mode:
            made = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=device)
        if source.device.type != "meta" and not source.is_floating_point():
            self._known.remember(made, source.cpu().clone())
        return made

    def on_host(self, tensor: Tensor) -> Tensor:
        """The trial's own tensor for one that stays on the host, which may be a device of the trial itself."""
        if self._mode is not None and self._known is not None and self.devices[0].type == "cpu":
            made = self.on_device(tensor, 0, self.current_account or 0)
            if tensor.device.type != "meta" and is_small(tensor):
                with compat.modes_disabled():
                    self._known.remember(made, tensor.detach().cpu().clone())
            return made
        with compat.modes_disabled():
            return on_host(tensor)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor, None where they are not known."""
        return tensor if self._known is None else self._known.value_of(tensor)

    def copied(self, tensor: Tensor, account: int) -> Tensor:
        """A copy on the same device, charged to another account."""
        with compat.modes_disabled():  # a transfer is no work of the block
            copied = tensor.detach().clone()
            self._tracer.allocate(copied.untyped_storage(), copied.untyped_storage().nbytes(), account)
            known = self._known.value_of(tensor) if self._known is not None else None
            if self._known is not None and known is not None:
                self._known.remember(copied, known.clone())
        return copied


def _as_on_cuda(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out an operation on fakes, with the storages that CUDA's kernels leave."""
    return AS_ON_CUDA.get(func, func)(*args, **kwargs)


def _as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)
