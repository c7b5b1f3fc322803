"""What is saved: the plain model's tensors, on the host."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from itertools import chain
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


def to_host(value: Any) -> Any:
    """`value` with every tensor in its lists, tuples and dicts on the CPU; the same object if all are there.

    Example:
        >>> to_host({"step": torch.tensor(1.0), "lr": 0.1})
        {'step': tensor(1.), 'lr': 0.1}
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
