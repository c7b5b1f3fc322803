"""What the CPU's kernels take beside operands and results, as oneDNN 3 lays tensors out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autobalance.simulated.results import AS_ON_CUDA

_aten = torch.ops.aten

_PAGE = 4096
_CACHE_LINE = 64
_MKLDNN = frozenset((torch.float32, torch.bfloat16, torch.float16))


def taken_inside(func: Any, args: Any, result: Any) -> int:
    """Bytes that a kernel of the CPU takes inside and gives back before it ends.

    Args:
        func: operator overload.
        args: its positional arguments.
        result: what it returned.
    """
    taken = _TAKEN.get(func)
    return 0 if taken is None else taken(args, result)


def carry_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out an operation on fakes, with the sizes that the CPU's kernel gives its results where torch's shape
    function refuses the operands, or does not know them.

    Args:
        func: operator overload.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        return _grouped(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
    if func in _LOSSES:
        return AS_ON_CUDA[func](*args, **kwargs)
    result = func(*args, **kwargs)
    if func is _aten.mkldnn_rnn_layer.default and args[14]:
        return (*result[:3], result[3].new_empty(recurrent_workspace(args[0], args[5].shape[-1], args[9])))
    return result


_LOSSES = frozenset(
    (
        _aten.mse_loss.default,
        _aten.smooth_l1_loss.default,
        _aten.binary_cross_entropy.default,
        _aten.soft_margin_loss.default,
    )
)
"""Reduced losses stay in the memory of the losses of all elements, as they do on CUDA."""


def _grouped(left: Tensor, right: Tensor, ends: Tensor | None) -> Tensor:
    """One product for each group, its rows on 16-byte boundaries (aten/src/ATen/native/GroupedMMUtils.h,
    create_grouped_gemm_output_tensor); torch's shape function takes bfloat16 only."""
    rows, columns = left.shape[-2], right.shape[-1]
    shape = [rows, columns]
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 else len(ends) if ends is not None else 1
        shape = [groups, rows, columns]
    pitch = _up(columns, 16 // left.itemsize)
    stride = [pitch, 1] if len(shape) == 2 else [rows * pitch, pitch, 1]
    return left.new_empty_strided(shape, stride)


def recurrent_workspace(source: Tensor, width: int, kind: int) -> int:
    """Bytes that one layer of oneDNN's LSTM keeps for its backward (src/cpu/rnn/rnn_utils.hpp, set_workspace_sizes;
    rnn_utils.cpp, set_offsets).

    Args:
        source: input, (time, batch, features).
        width: of the state.
        kind: of the cell, 2 for an LSTM.
    """
    time, batch, features = source.shape
    itemsize = source.itemsize
    widest = max(features, width)
    states = 2 * (time + 1) * batch
    cells = states * width if kind == _LSTM else 0
    parts = (
        time * batch * _leading(_GATES[kind] * width, itemsize) * itemsize,
        time * batch * _leading(width, itemsize) * itemsize,
        states * _leading(widest, itemsize) * itemsize,
        cells * itemsize,
        states * _leading(widest, 4) * 4,
        states * _leading(widest, 4) * 4,
        cells * 4,
    )
    return sum(_up(part, _PAGE) for part in parts)


_LSTM = 2
_GATES = {0: 1, 1: 1, _LSTM: 4, 3: 4}


def _leading(columns: int, itemsize: int) -> int:
    """Elements of a row: whole cache lines, but not so many that rows fall on the same ones (get_good_ld)."""
    line = _CACHE_LINE // itemsize
    row = _up(columns, line)
    return row + line if row % 256 == 0 else row


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _reduced_loss(args: Any, result: Tensor) -> int:
    """The losses of all elements, once more, and in float32 to be added up (aten/src/ATen/native/Loss.cpp,
    TORCH_IMPL_FUNC(mse_loss_out))."""
    whole = 0 if result.dim() else int(result.untyped_storage().nbytes())
    return whole if result.itemsize >= 4 else whole + whole // result.itemsize * 4


def _recurrent(args: Any, results: Any) -> int:
    """oneDNN's copies of the weights, and what the gates hold before their activation: of all steps at once in float32,
    of one in 16 bits (rnn_utils.hpp, scratch_gates)."""
    source, width, kind = args[0], int(args[5].shape[-1]), args[9]
    rows, gates = int(source.shape[-1]) + width, _GATES[kind] * width
    if source.itemsize < 4:
        return rows * gates * int(source.itemsize) + int(source.shape[1]) * _leading(gates, 4) * 4
    return rows * _leading(gates, 4) * 4 + _of_all_gates(source, gates)


def _recurrent_backward(args: Any, results: Any) -> int:
    """The same, both of the weights' gradients in oneDNN's layout, and the output's gradient: as rows, and in 16 bits
    in float32 too (aten/src/ATen/native/mkldnn/RNN.cpp, mkldnn_rnn_layer_backward)."""
    source, width, kind, gradient = args[0], int(args[5].shape[-1]), args[14], args[10]
    features, gates = int(source.shape[-1]), _GATES[kind] * width
    taken = (features + width) * _leading(gates, 4) * 4
    taken += 0 if gradient is None or gradient.is_contiguous() else int(gradient.nbytes)
    if source.itemsize < 4:
        time, batch = source.shape[:2]
        weights = (features + width) * gates * int(source.itemsize)
        return taken + weights + int(time) * int(batch) * width * 4 + int(batch) * _leading(gates, 4) * 4
    turned = sum(gates * _leading(columns, 4) * 4 for columns in (features, width) if _leading(columns, 4) != columns)
    return taken + turned + _of_all_gates(source, gates)


def _of_all_gates(source: Tensor, gates: int) -> int:
    return int(source.shape[0]) * int(source.shape[1]) * _leading(gates, 4) * 4


def _convolution(args: Any, result: Tensor) -> int:
    """oneDNN's copies of input, weight and output in blocks of channels; it gives the first two back before the output
    is copied to what torch returns (aten/src/ATen/native/mkldnn/Conv.cpp, _mkldnn_convolution)."""
    source, weight, _, stride, _, dilation, transposed, _, groups = args[:9]
    if not _uses_onednn(source, weight, stride, dilation, groups):
        return 0
    if _is_channels_last(source, weight):
        return int(weight.nbytes)
    made = _blocked(result)
    before = _blocked_source(source, weight, transposed) + _blocked_weight(weight) + made - result.nbytes
    return max(before, made)


def _convolution_backward(args: Any, results: Any) -> int:
    """The same for the gradient of the input, and after it for that of the weight."""
    gradient, source, weight, _, stride, _, dilation, transposed, _, groups, _ = args
    if not _uses_onednn(source, weight, stride, dilation, groups):
        return 0
    if _is_channels_last(source, weight):
        return 2 * int(weight.nbytes)
    of_source, of_weight, _ = results
    returned = sum(result.nbytes for result in results if result is not None)
    output, blocked = _blocked(gradient), _blocked_weight(weight)
    first = second = 0
    if of_source is not None:
        first = output + blocked + _blocked(source) - returned
    if of_weight is not None:
        second = output + _blocked_source(source, weight, transposed) + blocked - weight.nbytes
        if source.dtype is not torch.float32:
            second += _sums_in_float32(gradient, source, weight)
        second = max(second, blocked)  # what oneDNN made, until it is copied to what torch returns
    return max(first, second, 0)


def _sums_in_float32(gradient: Tensor, source: Tensor, weight: Tensor) -> int:
    """Of products in 16 bits, and one image of both operands, transposed, for each thread (oneDNN's
    src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp, init_scratchpad)."""
    images = int(source.shape[0])
    threads = min(torch.get_num_threads(), images)
    return int(weight.numel()) * 4 + (int(source.nbytes) + int(gradient.nbytes)) // images * threads


def _uses_onednn(source: Tensor, weight: Tensor, stride: Any, dilation: Any, groups: int) -> bool:
    """Whether torch leaves a convolution to oneDNN (aten/src/ATen/native/Convolution.cpp, use_mkldnn)."""
    if not torch.backends.mkldnn.is_available() or source.dtype not in _MKLDNN:
        return False
    if source.dtype is not torch.float32:
        return True
    kernel = weight.shape[2:]
    pointwise = all(size == 1 for size in (*kernel, *stride, *dilation))
    worth = not pointwise or source.shape[0] >= 16 or torch.get_num_threads() > 1
    large = groups > 1 or all(size > 3 for size in kernel) or source.shape[0] > 1 or source.numel() > 20480
    return worth and large


def _is_channels_last(source: Tensor, weight: Tensor) -> bool:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(source.dim())
    return last is not None and any(
        tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous() for tensor in (source, weight)
    )


def _block() -> int:
    """Channels that are side by side: those that fill a vector register."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def _blocked(tensor: Tensor) -> int:
    return tensor.nbytes // max(1, tensor.shape[1]) * _up(tensor.shape[1], _block())


def _blocked_source(source: Tensor, weight: Tensor, transposed: bool) -> int:
    """Images of up to three channels are read as they lie."""
    return 0 if source.shape[1] <= 3 and not transposed else _blocked(source)


def _blocked_weight(weight: Tensor) -> int:
    out, into = weight.shape[:2]
    inner = into if into <= 3 else _up(into, _block())
    return _up(out, _block()) * inner * math.prod(weight.shape[2:]) * weight.itemsize


def _upsampled(args: Any, result: Tensor) -> int:
    """Copies of input and output with channels last, for which kernels are vectorized (aten/src/ATen/native/cpu/
    UpSampleKernel.cpp, _use_vectorized_kernel_cond_2d)."""
    source, last = args[0], torch.channels_last
    is_last = source.is_contiguous(memory_format=last)
    if not (is_last and source.shape[1] > 3) and sum(result.shape[-2:]) > _LARGE_IMAGE:
        return 0
    return sum(tensor.nbytes for tensor in (source, result) if not tensor.is_contiguous(memory_format=last))


_LARGE_IMAGE = 128


_TAKEN: dict[Any, Callable[[Any, Any], int]] = {
    _aten.mse_loss.default: _reduced_loss,
    _aten.smooth_l1_loss.default: _reduced_loss,
    _aten.mkldnn_rnn_layer.default: _recurrent,
    _aten.mkldnn_rnn_layer_backward.default: _recurrent_backward,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.upsample_nearest2d.default: _upsampled,
    _aten._upsample_nearest_exact2d.default: _upsampled,
    _aten.upsample_bilinear2d.default: _upsampled,
}
