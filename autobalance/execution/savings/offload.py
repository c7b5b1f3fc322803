"""Blocks whose saved tensors are in pinned host memory between their forward and their backward.

As `torch.autograd.graph.save_on_cpu`, but whole storages, each once; on a stream of their own; and all of a call on
their way back as soon as its backward asks for the first, as `autobalance.timelines.recompute` counts them: what came
back earlier would be on the device beside what other backwards need there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autobalance.compat import storage_key, version
from autobalance.execution.savings.host_copies import Arrival, to_device, to_host
from autobalance.execution.savings.saved_tensors import SavedTensors
from autobalance.placement.hooks import Door, Remove, replace_method, run_method


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
    return [replace_method(module, name, partial(_run_offloading, door, device)) for name in methods]


def _run_offloading(
    door: Door,
    device: torch.device,
    module: nn.Module,
    name: str,
    inner: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return run_method(module, name, inner, args, kwargs)
    stays = registered_storages(module)
    saved = SavedTensors(door, device, stays, rest_of=partial(OnHostUntilBackward, device))
    with saved_tensors_hooks(saved.pack, saved.unpack):
        output = run_method(module, name, inner, args, kwargs)
    saved.end_forward()
    return output


def registered_storages(module: nn.Module) -> frozenset[int]:
    """Keys of the storages of a module's parameters and buffers, which are there anyway.

    Example:
        >>> len(registered_storages(nn.Linear(2, 2)))
        2

    Args:
        module: on any device.
    """
    tensors = (*module.parameters(), *module.buffers())
    return frozenset(storage_key(tensor.untyped_storage()) for tensor in tensors if tensor.layout is torch.strided)


class OnHostUntilBackward:
    """The storage of a saved tensor: in host memory, and on the device as long as others need it there.

    Args:
        device: where it comes from, and goes back to.
        tensor: one that was saved.
    """

    where = "saved by a block that keeps what it saves on the host"

    def __init__(self, device: torch.device, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.version = version(tensor)
        self.witness = tensor.detach()
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # which still counts changes
        self._device = device
        self._dtype = tensor.dtype
        self._storage = weakref.ref(storage)
        length = storage.nbytes() // tensor.element_size()
        self._host = to_host(tensor.detach().as_strided((length,), (1,), 0))

    def arrive(self) -> Arrival:
        """Its elements in a row, on the device."""
        storage = self._storage()
        if storage is None:
            return to_device(self._host, self._device)
        there = torch.empty(0, dtype=self._dtype, device=self._device)
        return Arrival(there.set_(storage, 0, (storage.nbytes() // there.element_size(),), (1,)))

    def is_of(self, storage: torch.UntypedStorage, number: int) -> bool:
        """Whether it holds what a storage does after so many changes."""
        return self._storage() is storage and self.version == number
