"""How much a mask selects whose numbers are unknown: the share that the user has declared as the most."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

_share: float | None = None
_used: list[str] = []


@contextlib.contextmanager
def selecting(share: float | None) -> Iterator[list[str]]:
    """Take masks whose numbers are unknown to select `share` of their elements inside.

    Example:
        >>> with selecting(0.5) as used:
        ...     trace()                                        # doctest: +SKIP

    Args:
        share: of the elements, from 0 to 1; None: an operation that depends on such a mask fails.

    Returns:
        The names of the operations that were answered so, as they come.
    """
    global _share, _used
    before = _share, _used
    _share, _used = share, []
    try:
        yield _used
    finally:
        _share, _used = before


def bounded(func: Any) -> Callable[..., Any] | None:
    """What gives results of the declared size in place of an operator whose shapes depend on numbers.

    Args:
        func: the operator overload.

    Returns:
        A kernel on fakes; None for other operators, and where nothing was declared.
    """
    kernel = _KERNELS.get(func) if _share is not None else None
    if kernel is not None:
        _used.append(str(func))
    return kernel


def bounded_positions(mask: Tensor) -> list[Tensor] | None:
    """Positions that a boolean index selects at most, one tensor a dimension; None where nothing was declared.

    Args:
        mask: a fake.
    """
    if _share is None:
        return None
    _used.append("index")
    return [mask.new_empty(_most(mask.numel()), dtype=torch.int64) for _ in mask.shape]


def _most(count: int) -> int:
    assert _share is not None
    return math.ceil(_share * count)


def _nonzero(value: Tensor) -> Tensor:
    return value.new_empty((_most(value.numel()), value.dim()), dtype=torch.int64)


def _masked_select(value: Tensor, mask: Tensor) -> Tensor:
    return value.new_empty(_most(torch.broadcast_shapes(value.shape, mask.shape).numel()))


def _unique(value: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    found = _most(value.numel())
    return _with_details(value, value.new_empty(found), value.shape, found, return_inverse, return_counts)


def _unique_consecutive(
    value: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    if dim is None:
        return _unique(value, True, return_inverse, return_counts)
    return _unique_dim(value, dim, True, return_inverse, return_counts)


def _unique_dim(
    value: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    shape = list(value.shape)
    along, shape[dim] = shape[dim], _most(shape[dim])
    made = value.new_empty(shape)
    return _with_details(value, made, torch.Size([along]), shape[dim], return_inverse, return_counts)


def _with_details(
    value: Tensor, made: Tensor, inverse: torch.Size, found: int, return_inverse: bool, return_counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        made,
        value.new_empty(inverse if return_inverse else 0, dtype=torch.int64),
        value.new_empty(found if return_counts else 0, dtype=torch.int64),
    )


_KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique_consecutive,
    _aten.unique_dim.default: _unique_dim,
}
