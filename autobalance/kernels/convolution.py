"""Memory that cuDNN's convolutions ask for: an allowance, since cuDNN chooses among its kernels and does not say why.

What is known: tensor cores read images with the channels last and in groups of 16 bytes. For images with the channels
first, cuDNN lays operands and result out anew in its workspace (its `nchwToNhwcKernel` and `nhwcToNchwKernel`).
Depthwise convolutions run on torch's own kernels, which take nothing. Sources: aten/src/ATen/native/Convolution.cpp
(use_cudnn_depthwise, is_depthwise), aten/src/ATen/native/cudnn/Conv_v8.cpp (the workspace lives for one call).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autobalance.kernels.bytes import copied, rounded, up
from autobalance.kernels.target import Target

LAYOUT = 1.0
"""Workspace as a share of operands and result laid out with channels last."""

CHANNEL_GROUP = 16
"""Bytes to which the channels of one pixel are filled up."""

_HALF = (torch.float16, torch.bfloat16)


def forward(
    target: Target,
    release: tuple[int, int],
    result: Tensor,
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> int:
    """Workspace of a forward, and the copies of operands that are not laid out as the kernel wants them."""
    if is_depthwise(image, weight, groups, transposed):
        return copied(image) + copied(weight)
    wanted = _memory_format(image, weight)
    return copied(image, wanted) + copied(weight, wanted) + workspace(target, wanted, image, weight, result)


def backward(
    target: Target,
    release: tuple[int, int],
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Any,
) -> int:
    """Workspace of the larger of the two kernels, and the copies of operands."""
    if is_depthwise(image, weight, groups, transposed):
        return copied(gradient) + copied(image)
    wanted = _memory_format(image, weight)
    copies = copied(gradient, wanted) + copied(image, wanted) + copied(weight, wanted)
    return copies + workspace(target, wanted, image, weight, gradient)


def is_depthwise(image: Tensor, weight: Tensor, groups: int, transposed: bool) -> bool:
    """Whether every channel is convolved on its own, for which torch has kernels without a workspace."""
    return not transposed and groups > 1 and image.shape[1] == groups and weight.shape[0] % groups == 0


def workspace(target: Target, laid_out: torch.memory_format, *tensors: Tensor) -> int:
    """Bytes of cuDNN's workspace for one kernel.

    Args:
        target: the GPU.
        laid_out: what kernel and operands agree on.
        tensors: image, weight and output, or their gradients.
    """
    if laid_out is not torch.contiguous_format or not _on_tensor_cores(target, tensors[0].dtype):
        return 0
    return rounded(int(LAYOUT * sum(_with_channels_last(tensor) for tensor in tensors)))


def _on_tensor_cores(target: Target, kind: torch.dtype) -> bool:
    if kind in _HALF:
        return target.capability >= (7, 0)
    return kind is torch.float32 and target.capability >= (8, 0) and torch.backends.cudnn.allow_tf32


def _with_channels_last(tensor: Tensor) -> int:
    others = math.prod((tensor.shape[0], *tensor.shape[2:]))
    return int(others * up(tensor.shape[1] * tensor.itemsize, CHANNEL_GROUP))


def _memory_format(image: Tensor, weight: Tensor) -> torch.memory_format:
    """Channels last if image or weight have them last (cudnn_conv_suggest_memory_format)."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.dim())
    if last is not None and any(_has(tensor, last) for tensor in (image, weight)):
        return last
    return torch.contiguous_format


def _has(tensor: Tensor, last: torch.memory_format) -> bool:
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
