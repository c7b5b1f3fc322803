"""Tensors in the arguments and results of operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def operands_in(value: Any) -> Iterator[Tensor]:
    """The tensors among what an operation is given or returns, in order, as often as they are there.

    Operations know lists, tuples and mappings only, and there are many operations: what modules are given may hold
    anything, see `autobalance.placement.contents.tensors_in`.

    Example:
        >>> [tensor.item() for tensor in operands_in({"a": torch.tensor(1), "b": [torch.tensor(2), None]})]
        [1, 2]

    Args:
        value: a tensor, a container or anything else, which holds none.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from operands_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from operands_in(item)
