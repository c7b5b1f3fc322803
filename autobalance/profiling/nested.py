"""Tensors in the arguments and results of operations and modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in any nesting of lists, tuples and mappings, in order.

    Example:
        >>> [tensor.item() for tensor in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), None]})]
        [1, 2]

    Args:
        value: a tensor, a container or anything else, which holds none.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
