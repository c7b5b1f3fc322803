"""When two modules, or two calls, are so alike that measuring one of them is enough."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn

from autobalance.measuring.visit import Call
from autobalance.placement.contents import attributes


def signature_of_module(module: nn.Module) -> Hashable:
    """Classes, settings as `repr` shows them, modes, and shapes of parameters and buffers.

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
        tuple(part.training for part in module.modules()),
        tuple((name, signature_of(tensor)) for name, tensor in tensors),
    )


def signature_of(value: Any) -> Hashable:
    """Shapes and types of the tensors in a call, or in anything else that it may hold, beside plain values.

    Args:
        value: a `Call`, or any nesting of tensors and other things.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Call):
        return value.name, signature_of(value.args), signature_of(value.kwargs), value.grad, value.autocast
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Mapping):
        return type(value), tuple((str(key), signature_of(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(signature_of, value))
    return type(value), tuple((name, signature_of(item)) for name, item in attributes(value).items())
