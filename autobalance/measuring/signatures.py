"""When two modules, or two calls, are so alike that measuring one of them is enough."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autobalance.measuring.call import Call
from autobalance.placement.contents import attributes


def signature_of_module(module: nn.Module) -> Hashable:
    """Classes, settings, modes, and shapes of parameters and buffers.

    Settings are what `repr` shows and all plain attributes, but for numbers that only say which of many layers it is.

    Example:
        >>> signature_of_module(nn.Linear(2, 3)) == signature_of_module(nn.Linear(2, 3))
        True

    Args:
        module: a block or a part of it.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    return (
        tuple(type(part) for part in module.modules()),
        repr(module),
        tuple(_settings(part) for part in module.modules()),
        tuple((name, signature_of(tensor)) for name, tensor in tensors),
    )


_POSITIONS = ("idx", "index", "layer_id", "layer_number")
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype)


def _settings(part: nn.Module) -> Hashable:
    attributes = ((name, _plain(value)) for name, value in sorted(vars(part).items()) if not _is_position(name, value))
    return tuple((name, value) for name, value in attributes if value is not NotImplemented)


def _is_position(name: str, value: Any) -> bool:
    return name.endswith(_POSITIONS) and isinstance(value, int) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """The value with its type, which tells 1 and True apart; NotImplemented where it is not plain."""
    if value is None or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        items = tuple(map(_plain, value))
        return NotImplemented if NotImplemented in items else (type(value), items)
    return NotImplemented


def signature_of(value: Any) -> Hashable:
    """Shapes and types of the tensors in a call, or in anything else that it may hold, beside plain values.

    Args:
        value: a `Call`, or any nesting of tensors and other things.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Call):
        given = signature_of(value.args), signature_of(value.kwargs), value.on_host
        return value.name, *given, value.grad, value.autocast
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Mapping):
        return type(value), tuple((str(key), signature_of(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(signature_of, value))
    return type(value), tuple((name, signature_of(item)) for name, item in attributes(value).items())
