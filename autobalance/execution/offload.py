"""Blocks whose saved tensors are in pinned host memory between their forward and their backward.

As `torch.autograd.graph.save_on_cpu`, but whole storages, each once; on a stream of their own; and all of a call on their
way back as soon as its backward asks for the first (as `autobalance.timelines.recompute` counts them). Pinned buffers are
those of torch's caching host allocator, which uses them again once the copies that use them are through.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autobalance.compat import parts_of, storage_key, version
from autobalance.execution.host_copies import Arrival, to_device, to_host
from autobalance.placement.hooks import Door, Remove, inside, replace_method, run_method


@dataclass(frozen=True, eq=False)
class _Offloaded:
    """A block that offloads; `device` is where it is."""

    door: Door
    device: torch.device


def offload(door: Door, device: torch.device, module: nn.Module, methods: Sequence[str]) -> list[Remove]:
    """Let methods of a block's module have what they save in host memory between forward and backward.

    Weights stay, and what is still on the device when the backward asks for it is not brought back a second time.

    Example:
        >>> removes = offload(door, torch.device("cuda", 0), block, ["forward"])     # doctest: +SKIP

    Args:
        door: of the block.
        device: where it is.
        module: the block, or one of its modules.
        methods: names, "forward" among them.

    Returns:
        What undoes it.
    """
    return [replace_method(module, name, partial(_run_offloaded, _Offloaded(door, device))) for name in methods]


def _run_offloaded(
    block: _Offloaded, module: nn.Module, name: str, inner: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return run_method(module, name, inner, args, kwargs)
    call = OffloadedCall(block.door, block.device, registered_storages(module))
    with saved_tensors_hooks(call.pack, call.unpack):
        output = run_method(module, name, inner, args, kwargs)
    call.end_forward()
    return output


def registered_storages(module: nn.Module) -> frozenset[int]:
    """Keys of the storages of a module's parameters and buffers, which are there anyway.

    Example:
        >>> len(registered_storages(nn.Linear(2, 2)))
        2
    """
    tensors = (*module.parameters(), *module.buffers())
    return frozenset(storage_key(tensor.untyped_storage()) for tensor in tensors if tensor.layout is torch.strided)


class OffloadedCall:
    """What one call of a block saves; several calls may be under way, of several micro-batches, say.

    Args:
        door: of the block.
        device: where it is.
        stays: keys of storages that are not offloaded.
    """

    def __init__(self, door: Door, device: torch.device, stays: frozenset[int]) -> None:
        self._door = door
        self._device = device
        self._stays = stays
        self._rests: dict[int, _Rest] = {}
        # Told by autograd, which drops what it has saved once nothing asks for it any more.
        self._parts: weakref.WeakSet[_Part] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> _Part | Tensor:
        """What autograd keeps in place of a tensor that it saves."""
        if not self._goes(tensor):
            return tensor.detach()  # itself, it would hold the node that holds it
        with torch.no_grad(), inside(self._door):
            key, number = storage_key(tensor.untyped_storage()), version(tensor)
            rest = self._rests.get(key)
            # A storage that has died lends its key to the next one.
            if rest is None or rest.storage() is not tensor.untyped_storage() or rest.version != number:
                rest = self._rests[key] = _Rest(tensor, number)
            part = _Part(rest, tensor, len(self._parts))
            self._parts.add(part)
        return part

    def end_forward(self) -> None:
        """Leave it to autograd how long what was saved is kept."""
        self._rests.clear()

    def unpack(self, packed: _Part | Tensor) -> Tensor:
        """The tensor again, for the backward."""
        if not isinstance(packed, _Part):
            return packed
        packed.check()
        with torch.no_grad(), inside(self._door):
            if packed.arrival is None:
                self._bring_back(packed)
            arrival, packed.arrival = packed.arrival, None
            assert arrival is not None
            return packed.of(arrival.wait())

    def _goes(self, tensor: Tensor) -> bool:
        if tensor.device != self._device or tensor.layout is not torch.strided or not tensor.untyped_storage().nbytes():
            return False
        if tensor.is_conj() or tensor.is_neg() or parts_of(tensor):  # more than a view of a storage
            return False
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        return not is_weight and storage_key(tensor.untyped_storage()) not in self._stays

    def _bring_back(self, first: _Part) -> None:
        """Send for everything that the backward may ask for, what was saved last first."""
        arrivals: dict[int, Arrival] = {}
        waiting = [part for part in self._parts if part.arrival is None]
        for part in (first, *sorted(waiting, key=lambda part: -part.number)):
            if id(part.rest) not in arrivals:
                arrivals[id(part.rest)] = part.rest.arrive(self._device)
            part.arrival = arrivals[id(part.rest)]


class _Rest:
    """A storage that was saved: in host memory, and on the device as long as others need it there."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        storage = tensor.untyped_storage()
        self.storage = weakref.ref(storage)
        self.version = number
        self._dtype = tensor.dtype
        # Counts changes with the tensor, and holds nothing of it.
        self.witness = tensor.detach()
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        length = storage.nbytes() // tensor.element_size()
        self._host = to_host(tensor.detach().as_strided((length,), (1,), 0))

    def arrive(self, device: torch.device) -> Arrival:
        """Its elements in a row, on the device."""
        storage = self.storage()
        if storage is not None:
            there = torch.empty(0, dtype=self._dtype, device=device)
            return Arrival(there.set_(storage, 0, (storage.nbytes() // there.element_size(),), (1,)))
        return to_device(self._host, device)


class _Part:
    """A saved tensor: a view of a storage that rests on the host."""

    def __init__(self, rest: _Rest, tensor: Tensor, number: int) -> None:
        self.rest = rest
        self.arrival: Arrival | None = None
        self.number = number
        self._dtype = tensor.dtype
        self._layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def of(self, elements: Tensor) -> Tensor:
        """The tensor, as a view of the elements of its storage."""
        size, stride, offset = self._layout
        elements = elements if elements.dtype == self._dtype else elements.view(self._dtype)
        return elements.as_strided(size, stride, offset)

    def check(self) -> None:
        """Refuse, as torch does, to go back with other numbers than the forward went on with."""
        now = version(self.rest.witness)
        if now != self.rest.version:
            size, _, _ = self._layout
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._dtype} {list(size)}] is at version {now}; expected version {self.rest.version} instead. It "
                f"was saved by a block that keeps what it saves on the host."
            )
