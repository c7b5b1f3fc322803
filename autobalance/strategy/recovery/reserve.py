"""Ask for the memory of an optimizer step before it begins: half an update could not be undone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from autobalance.partitioning.plan import Plan
from autobalance.placement.contents import tensors_in
from autobalance.strategy.recovery.shortage import memory_allocated

_PIECE = 64 * 2**20
"""Bytes that are asked for at once: a caching allocator need not have the whole in one piece."""


def reserve_update(plan: Plan, devices: Sequence[torch.device], optimizers: Iterable[Optimizer]) -> None:
    """Allocate, and free again, what the plan has for an optimizer step on each device.

    Args:
        plan: where everything is.
        devices: the torch device of each device of the plan.
        optimizers: those of the model, gradients being there.

    Raises:
        torch.OutOfMemoryError: it is not there; nothing has changed.
    """
    held = _state_on(optimizers)
    for index, device in enumerate(devices):
        if device.type == "cpu":
            continue
        wanted = update_bytes(plan, index, held.get(device, 0))
        # Never more than planned for the device: then it would be this that runs out of memory.
        wanted = min(wanted, plan.peaks[index] - memory_allocated(device))
        pieces = [
            torch.empty(min(_PIECE, wanted - start), dtype=torch.uint8, device=device)
            for start in range(0, wanted, _PIECE)
        ]
        del pieces


def update_bytes(plan: Plan, device: int, held: int) -> int:
    """Bytes that an optimizer step adds to a device: state that is not there yet, and one temporary per gradient.

    Optimizers that update all parameters at once, as is the default on GPUs, make a list of tensors as large as the
    gradients (torch/optim/adam.py, `_multi_tensor_adam`).

    Args:
        plan: where everything is.
        device: position of the device.
        held: bytes of optimizer state that are on it already.
    """
    rows = [plan.blocks[block] for block in plan.blocks_on(device)]
    return max(0, sum(row.optimizer for row in rows) - held) + sum(row.gradients for row in rows)


def _state_on(optimizers: Iterable[Optimizer]) -> dict[torch.device, int]:
    held: dict[torch.device, int] = {}
    for optimizer in optimizers:
        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        for tensor in tensors_in(states, in_objects=True):
            held[tensor.device] = held.get(tensor.device, 0) + tensor.nbytes
    return held
