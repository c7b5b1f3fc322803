"""Memory that kernels take inside, beside their operands and results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.kernels import attention_scratch, convolution, recurrent, table, workspaces
from autobalance.kernels.bytes import FLOAT, LONG, buffer, copied, up
from autobalance.kernels.target import Target
from autobalance.kernels.versions import release

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Taken:
    """What one operation takes beside its operands and results.

    Attributes:
        transient: bytes alive only inside the kernel.
        workspaces: (name, bytes) of what the device keeps from then on; each name once a device.
        is_allowance: whether that is what a closed library is allowed, which only measuring can tell.
        calls: of cuDNN, each of which takes its workspace when the one before has given its own back.
    """

    transient: int = 0
    workspaces: tuple[tuple[str, int], ...] = ()
    is_allowance: bool = False
    calls: tuple[convolution.CudnnCall, ...] = ()


NOTHING = Taken()


def taken_inside(func: Any, args: Any, kwargs: Any, result: Any, target: Target) -> Taken:
    """Scratch of one operation.

    Args:
        func: operator overload.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: what it returned.
        target: whose kernels.
    """
    if not target.is_emulated:
        return NOTHING
    transient = 0
    of_operands = FROM_OPERANDS.get(func)
    if of_operands is not None:
        transient = of_operands(target, release(), *args, **kwargs)
    calls: tuple[convolution.CudnnCall, ...] = ()
    if func is _aten.convolution.default:
        calls = convolution.forward(target, result, *args, **kwargs)
    elif func is _aten.convolution_backward.default:
        calls = convolution.backward(target, *args, **kwargs)
    kept: tuple[tuple[str, int], ...] = ()
    if func in workspaces.MULTIPLYING:
        kept = workspaces.kept_by(func, compat.in_backward(), target, release())
    return Taken(transient, kept, func in ALLOWED, calls) if transient or kept or calls else NOTHING


def _multiplied(target: Target, release: tuple[int, int], *args: Any, **options: Any) -> int:
    """Copies of matrices that cuBLAS cannot read as they lie (aten/src/ATen/native/cuda/cuBlasCommonArgs.h,
    prepare_matrix_for_cublas; Blas.cpp, prepare_batch_matrix_for_cublas)."""
    return sum(_copied_matrix(matrix) for matrix in args[-2:] if isinstance(matrix, Tensor))


def _copied_matrix(matrix: Tensor) -> int:
    if matrix.dim() < 2 or matrix.numel() == 0 or matrix.is_contiguous():
        return 0
    (rows, columns), (by_row, by_column) = matrix.shape[-2:], matrix.stride()[-2:]
    if (by_row == 1 and by_column >= max(1, rows)) or (by_column == 1 and by_row >= max(1, columns)):
        return 0
    return buffer(matrix.shape, matrix.itemsize)


def _embedding_backward(
    target: Target,
    release: tuple[int, int],
    gradient: Tensor,
    indices: Tensor,
    rows: int,
    padding: int,
    by_frequency: bool,
) -> int:
    """Sorted indices, their segments, and float32 partial sums (aten/src/ATen/native/cuda/Embedding.cu,
    EmbeddingBackwardKernel.cu)."""
    count, width = indices.numel(), gradient.shape[-1]
    taken = copied(gradient) + copied(indices)
    if count == 0 or (count <= _FEW_INDICES and not by_frequency):
        return taken
    segments = min(count, rows)
    partial = count // _ROWS_A_THREAD + segments
    index = indices.itemsize
    taken += 3 * buffer((count,), index) + 2 * buffer((segments,), index) + buffer((partial,), index)
    taken += 2 * buffer((), LONG) + (buffer((count,), index) if by_frequency else 0)
    if _is_fused(target, release, segments, partial, width):
        wide = buffer((rows, width), FLOAT) if gradient.dtype in _HALF else 0
        return taken + buffer((partial,), index) + wide
    itemsize = FLOAT if gradient.dtype in _HALF else gradient.itemsize
    return taken + buffer((partial, width), itemsize)


_FEW_INDICES = 3072
_ROWS_A_THREAD = 10
_LARGEST_BLOCK = 1024
_WARP = 32


def _is_fused(target: Target, release: tuple[int, int], segments: int, partial: int, width: int) -> bool:
    """Whether partial sums are added up where they belong, as when few rows are used often."""
    warped = up(width, _WARP)
    blocks = math.ceil(segments * warped / min(warped, _LARGEST_BLOCK))
    few = blocks < table.PROCESSORS.value(target, release) * table.EMBEDDING_BLOCKS.value(target, release)
    return few and partial > blocks * 4 and not torch.are_deterministic_algorithms_enabled()


def _safe_softmax(target: Target, release: tuple[int, int], scores: Tensor, dim: int, dtype: Any = None) -> int:
    """The softmax before masked rows are set to zero, and where the mask is (aten/src/ATen/native/transformers/
    attention.cpp, _safe_softmax)."""
    return buffer(scores.shape, (dtype or scores.dtype).itemsize) + buffer(scores.shape, 1)


def _cross_entropy_with_logits(
    target: Target,
    release: tuple[int, int],
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    positive: Tensor | None = None,
    reduction: int = 1,
) -> int:
    """Log-sigmoid and the loss before it is reduced (aten/src/ATen/native/Loss.cpp)."""
    whole = buffer(torch.broadcast_shapes(logits.shape, labels.shape), logits.itemsize)
    return whole + (whole if reduction else 0) + (whole if positive is not None and not reduction else 0)


def _sorted(target: Target, release: tuple[int, int], value: Tensor, *rest: Any, **options: Any) -> int:
    """A second pair of values and positions (aten/src/ATen/native/cuda/Sort.cpp; rows of up to 4096 stay in place)."""
    dim = options.get("dim", -1)
    if value.dim() == 0 or value.shape[dim if isinstance(dim, int) else -1] <= _SORTED_IN_PLACE:
        return 0
    return buffer(value.shape, value.itemsize) + 2 * buffer(value.shape, LONG)


_SORTED_IN_PLACE = 4096


def _put(
    target: Target, release: tuple[int, int], value: Tensor, indices: Any, values: Tensor, accumulate: bool = False
) -> int:
    """Positions, sorted with their origins, where contributions are added up (aten/src/ATen/native/cuda/Indexing.cu,
    index_put_with_sort_kernel)."""
    if not accumulate:
        return 0
    shapes = [index.shape for index in indices if index is not None and index.dtype is not torch.bool]
    count = math.prod(torch.broadcast_shapes(*shapes)) if shapes else 0
    return 5 * buffer((count,), LONG) + copied(values)


def _contiguous_operands(*positions: int) -> Callable[..., int]:
    """Copies of operands that a kernel first makes contiguous."""

    def copies(target: Target, release: tuple[int, int], *args: Any, **options: Any) -> int:
        return sum(copied(args[position]) for position in positions if position < len(args))

    return copies


def _norms(target: Target, release: tuple[int, int], tensors: Any, *rest: Any, **options: Any) -> int:
    """A number for each chunk of each tensor (aten/src/ATen/native/cuda/ForeachReduceOp.cu)."""
    longest = max((math.ceil(tensor.numel() / _CHUNK) for tensor in tensors), default=0)
    wide = max((FLOAT if tensor.dtype in _HALF else tensor.itemsize for tensor in tensors), default=FLOAT)
    return buffer((len(tensors), longest), wide)


_CHUNK = 65536

FROM_OPERANDS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention.default: attention_scratch.flash_forward,
    _aten._scaled_dot_product_flash_attention_backward.default: attention_scratch.flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: attention_scratch.efficient_forward,
    _aten._scaled_dot_product_efficient_attention_backward.default: attention_scratch.efficient_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: attention_scratch.cudnn_backward,
    _aten._safe_softmax.default: _safe_softmax,
    _aten.addmm.default: _multiplied,
    _aten.baddbmm.default: _multiplied,
    _aten.bmm.default: _multiplied,
    _aten.mm.default: _multiplied,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.binary_cross_entropy_with_logits.default: _cross_entropy_with_logits,
    _aten._cudnn_rnn.default: recurrent.workspace,
    _aten._cudnn_rnn_backward.default: recurrent.workspace,
    _aten.native_layer_norm.default: _contiguous_operands(0),
    _aten.native_layer_norm_backward.default: _contiguous_operands(0, 1),
    _aten._fused_rms_norm.default: _contiguous_operands(0),
    _aten._fused_rms_norm_backward.default: _contiguous_operands(0, 1),
    _aten.native_group_norm.default: _contiguous_operands(0),
    _aten.native_group_norm_backward.default: _contiguous_operands(0, 1),
    _aten.sort.default: _sorted,
    _aten.sort.stable: _sorted,
    _aten.index_put.default: _put,
    _aten.index_put_.default: _put,
    _aten._foreach_norm.Scalar: _norms,
}
"""Bytes that an operator's kernel takes inside, by operator: called with target, release of torch and its arguments."""

ALLOWED = frozenset(
    (
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten._cudnn_rnn.default,
        _aten._cudnn_rnn_backward.default,
        _aten._scaled_dot_product_cudnn_attention_backward.default,
    )
)
"""Operators whose library does not say what it takes."""
