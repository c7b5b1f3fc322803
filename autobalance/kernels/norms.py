"""Normalisations: which are one kernel on a GPU, and in which type it keeps its statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autobalance.kernels import table
from autobalance.kernels.target import Target

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def is_rms_norm_fused(target: Target, release: tuple[int, int], value: Tensor, weight: Tensor | None) -> bool:
    """Whether `rms_norm` is one kernel that saves its input and one number a row.

    Args:
        target: the GPU.
        release: of torch.
        value: the input.
        weight: of the same type as the input, or the composite of plain operations runs.

    Source: aten/src/ATen/native/layer_norm.cpp, rms_norm_symint.
    """
    contiguous = value.is_contiguous() or not _is_channels_last(value)
    same_type = weight is None or weight.dtype is value.dtype
    return bool(table.FUSED_RMS_NORM.value(target, release)) and contiguous and same_type and not value.is_complex()


def group_norm(
    target: Target,
    release: tuple[int, int],
    value: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    enabled: bool = True,
) -> Tensor:
    """`group_norm` with the copy of its input that a release of torch makes before the kernel.

    Args:
        target: the GPU, which knows no channels-last kernel where the copy is an operation of its own.
        release: of torch.
        value: the input.
        groups, weight, bias, eps, enabled: as for torch's.

    Source: aten/src/ATen/native/group_norm.cpp, group_norm.
    """
    if not copies_group_norm(target, release):
        plain: Tensor = _aten.group_norm.default.decompose(value, groups, weight, bias, eps, enabled)
        return plain
    kept = _is_channels_last(value) and not target.is_emulated
    value = value if kept else value.contiguous()
    parts = [part if part is None else part.contiguous() for part in (weight, bias)]
    count, channels = value.shape[:2]
    inner = math.prod(value.shape[2:])
    result: Tensor = _aten.native_group_norm(value, *parts, count, channels, inner, groups, eps)[0]
    return result


def copies_group_norm(target: Target, release: tuple[int, int]) -> bool:
    """Whether operands of `group_norm`, forward and backward, are made contiguous before the kernel.

    Args:
        target: the GPU.
        release: of torch.
    """
    return bool(table.GROUP_NORM_COPIES.value(target, release))


def _is_channels_last(value: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return value.dim() in formats and value.is_contiguous(memory_format=formats[value.dim()])


def _native_layer_norm(value: Tensor, normalized_shape: Any, *rest: Any) -> tuple[Tensor, ...]:
    result, mean, scale = _aten.native_layer_norm.default(value, normalized_shape, *rest)
    return result, _wide(mean), _wide(scale)


def _fused_rms_norm(
    value: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    rows = value.shape[: value.dim() - len(normalized_shape)]
    scale = value.new_empty((*rows, *(1 for _ in normalized_shape)), dtype=_statistics_type(value.dtype))
    return torch.empty_like(value, memory_format=torch.contiguous_format), scale


def _fused_rms_norm_backward(
    gradient: Tensor, value: Tensor, normalized_shape: Any, scale: Tensor, weight: Tensor | None, wanted: Any
) -> tuple[Tensor | None, Tensor | None]:
    of_value = torch.empty_like(value, memory_format=torch.contiguous_format) if wanted[0] else None
    of_weight = torch.empty_like(weight) if wanted[1] and weight is not None else None
    return of_value, of_weight


def _statistics_type(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if kind in _HALF else kind


def _wide(statistics: Tensor) -> Tensor:
    return statistics.to(_statistics_type(statistics.dtype))


STANDING_IN: dict[Any, Callable[..., Any]] = {
    _aten.native_layer_norm.default: _native_layer_norm,
    _aten._fused_rms_norm.default: _fused_rms_norm,
    _aten._fused_rms_norm_backward.default: _fused_rms_norm_backward,
}
"""Operators, and kernels on fakes that leave what a GPU's leave: statistics of half precision in float32.

Sources: aten/src/ATen/native/cuda/layer_norm_kernel.cu (layer_norm_cuda, _fused_rms_norm_cuda).
"""

KERNELS_OF_THEIR_OWN = (_aten._fused_rms_norm.default,)
"""Operators that are one kernel on a GPU, and several operations where torch knows no such kernel."""
