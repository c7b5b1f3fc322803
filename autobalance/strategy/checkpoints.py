"""What is saved: the plain model's tensors, on the host."""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Mapping, MutableMapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def host_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The module's state on the host, tied tensors copied once.

    Args:
        module: the module that `state` is of.
        state: its `state_dict()`.

    Returns:
        A state of the same type with tensors on the CPU; those that are there already are not copied.
    """
    identities = {
        name: id(tensor)
        for name, tensor in chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        )
    }
    copies: dict[tuple[int, torch.Size, torch.dtype], Any] = {}
    result = copy.copy(state)  # keeps the type, and the versions that an OrderedDict of torch carries
    assert isinstance(result, MutableMapping)
    for name, value in state.items():
        identity = identities.get(name)
        if isinstance(value, Tensor) and identity is not None:
            key = (identity, value.shape, value.dtype)
            value = copies[key] = copies[key] if key in copies else to_host(value)
        result[name] = to_host(value)
    return result  # type: ignore[return-value]  # a mutable mapping, as torch types its state too


def is_local_file(checkpoint_io: Any, path: Any) -> bool:
    """Whether `path` is an ordinary file to be read and written by Lightning's plain way with torch.

    Args:
        checkpoint_io: the Trainer's.
        path: of a checkpoint.
    """
    return type(checkpoint_io).__name__ == "TorchCheckpointIO" and "://" not in str(path)


def write_file(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Write a checkpoint straight to its file, at once or not at all.

    Lightning's own way first writes all of it into memory, which would be a second copy of the model.

    Args:
        checkpoint: what `torch.save` takes.
        path: a local file, replaced only when the new one is whole.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    try:
        torch.save(checkpoint, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def to_host(value: Any) -> Any:
    """`value` with every tensor in its lists, tuples and dicts on the CPU; the same object if all are there.

    Example:
        >>> to_host({"step": torch.tensor(1.0), "lr": 0.1})
        {'step': tensor(1.), 'lr': 0.1}

    Args:
        value: any, nested or not.
    """
    if isinstance(value, Tensor):
        return value if value.device.type == "cpu" else value.detach().cpu()
    if isinstance(value, MutableMapping):
        moved = {key: to_host(item) for key, item in value.items()}
        if all(item is value[key] for key, item in moved.items()):
            return value
        result = copy.copy(value)
        for key, item in moved.items():
            result[key] = item
        return result
    if isinstance(value, (list, tuple)):
        items = [to_host(item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        make = getattr(type(value), "_make", type(value))  # named tuples
        return make(items)
    return value
