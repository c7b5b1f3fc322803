"""What one operation is to the device that carries it out: arithmetic, memory traffic, a kernel to launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.devices.roofline import Work

_aten = torch.ops.aten

_LAUNCHES_NOTHING = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.resize_.default,
    _aten.set_.source_Tensor,
    _aten._unsafe_view.default,
    _aten.record_stream.default,
}
"""Operators that are no views by their schema and yet only allocate, or give a tensor another shape."""


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work | None:
    """The work of one operation; None for a view, an allocation and whatever else launches no kernel.

    Example:
        >>> work_of(torch.ops.aten.mm.default, (x, x), {}, x @ x)         # x: 4 x 4, float32
        Work(arithmetic='float32', flops=128, traffic=192, launches=1)

    Args:
        func: the operator overload.
        args, kwargs, result: of the call; operands are read once, and results are written once.
    """
    if getattr(func, "is_view", False) or func in _LAUNCHES_NOTHING:
        return None
    flops = compat.flops_of(func, args, kwargs, result)
    return Work(_arithmetic(func, args) if flops else "", flops, bytes_in(args) + bytes_in(result), 1)


def bytes_in(value: Any) -> int:
    """Bytes of all elements of a tensor, or of the tensors in a list.

    Args:
        value: an argument or result of an operation.
    """
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_in, value))
    return 0


def _arithmetic(func: Any, args: Any) -> str:
    """The kind of arithmetic of a matrix product or convolution; CUDA rounds float32 to tf32 where the user lets it."""
    dtype = next((dtype for value in args if (dtype := _dtype(value)) is not None), torch.float32)
    name = str(dtype).removeprefix("torch.")
    if dtype is torch.float32:
        convolution = "conv" in func.__name__
        backends: Any = torch.backends  # torch declares no types for the settings of operators
        setting = backends.cudnn.conv if convolution else backends.cuda.matmul
        return "tf32" if setting.fp32_precision == "tf32" else name
    return name


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.dtype
    if isinstance(value, (list, tuple)):
        return next((dtype for item in value if (dtype := _dtype(item)) is not None), None)
    return None
