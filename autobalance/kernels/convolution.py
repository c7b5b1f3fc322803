"""Memory that cuDNN's convolutions ask for: an allowance, since cuDNN chooses among its kernels and does not say why.

What is known: tensor cores read images with the channels last and in groups of 16 bytes. For images with the channels
first, cuDNN lays operands and result out anew in its workspace (its `nchwToNhwcKernel` and `nhwcToNchwKernel`), which
lives for one call of a kernel: one for the output, one for the image's gradient, one for the weight's, in this order.
Depthwise convolutions run on torch's own kernels, which take nothing. Sources: aten/src/ATen/native/Convolution.cpp
(use_cudnn_depthwise, is_depthwise), aten/src/ATen/native/cudnn/ConvShared.cpp (cudnn_convolution_backward),
aten/src/ATen/native/cudnn/Conv_v8.cpp (run_conv_plan).

What is inferred, from what hundreds of image models held on an A100 in float32 (GPUMemNet, arXiv 2602.17817): which
kernels copy. Those of the output read float32 as it lies, and so do kernels of one pixel, which multiply matrices, and
of groups; a weight's gradient is summed up in parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from autobalance.kernels.bytes import FLOAT, up
from autobalance.kernels.target import Target

Computed = Literal["output", "image gradient", "weight gradient"]

CHANNEL_GROUP = 16
"""Bytes to which the channels of one pixel are filled up."""

PARTIAL_SUMS = 4
"""Parts of a batch whose weight gradients are summed up apart, in float32, and then added (split-K)."""

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CudnnCall:
    """One call of cuDNN.

    Attributes:
        workspace: bytes that it takes and gives back, with copies of operands that are not laid out as it wants them.
        problem: what cuDNN is asked, by which `torch.backends.cudnn.benchmark` remembers the fastest kernel.
    """

    workspace: int
    problem: tuple[Any, ...]


def forward(
    target: Target,
    result: Tensor,
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[CudnnCall, ...]:
    """The call of a forward, with the arguments of `aten::convolution` and what it returned; none if depthwise.

    Args:
        target: whose kernel it is.
        result: what the operator returned.
        image, weight, bias, stride, padding, dilation, transposed, output_padding, groups: as the operator has them.
    """
    if is_depthwise(image, weight, groups, transposed):
        return ()
    convolution = _Convolution(target, image, weight, result, (stride, padding, dilation), groups)
    copies = convolution.copied(image) + convolution.copied(weight)
    return (convolution.call("image gradient" if transposed else "output", copies),)


def backward(
    target: Target,
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[CudnnCall, ...]:
    """The calls of a backward, with the arguments of `aten::convolution_backward`; none if depthwise.

    Args:
        target: whose kernel it is.
        gradient, image, weight, bias_sizes, stride, padding, dilation: as the operator has them.
        transposed, output_padding, groups, output_mask: likewise.
    """
    if is_depthwise(image, weight, groups, transposed):
        return ()
    convolution = _Convolution(target, image, weight, gradient, (stride, padding, dilation), groups)
    copies = convolution.copied(gradient)
    calls = []
    if output_mask[0]:
        calls.append(
            convolution.call("output" if transposed else "image gradient", copies + convolution.copied(weight))
        )
    if output_mask[1]:
        calls.append(convolution.call("weight gradient", copies + convolution.copied(image)))
    return tuple(calls)


def is_depthwise(image: Tensor, weight: Tensor, groups: int, transposed: bool) -> bool:
    """Whether every channel is convolved on its own, for which torch has kernels without a workspace.

    Args:
        image, weight: `[batch, channels, ...]` and `[out, in / groups, ...]`.
        groups, transposed: as the operator has them.
    """
    return not transposed and groups > 1 and image.shape[1] == groups and weight.shape[0] % groups == 0


@dataclass(frozen=True)
class _Convolution:
    """One convolution; `output` may be its gradient, `steps` are stride, padding and dilation."""

    target: Target
    image: Tensor
    weight: Tensor
    output: Tensor
    steps: tuple[Sequence[int], ...]
    groups: int

    def call(self, computed: Computed, copies: int) -> CudnnCall:
        steps = tuple(tuple(step) for step in self.steps)
        shapes = tuple(self.image.shape), tuple(self.weight.shape)
        kind = self.image.dtype, self._memory_format
        return CudnnCall(copies + self._laid_out_anew(computed), (computed, *shapes, *steps, self.groups, *kind))

    def copied(self, operand: Tensor) -> int:
        """Bytes of an operand that is not laid out as the kernel wants it."""
        return 0 if operand.is_contiguous(memory_format=self._memory_format) else operand.numel() * operand.itemsize

    def _laid_out_anew(self, computed: Computed) -> int:
        kind = self.image.dtype
        if self._memory_format is not torch.contiguous_format or not _on_tensor_cores(self.target, kind):
            return 0
        if self.groups > 1 or math.prod(self.weight.shape[2:]) == 1 or (computed == "output" and kind not in _HALF):
            return 0
        weights = self.weight.numel()
        weights *= PARTIAL_SUMS * FLOAT if computed == "weight gradient" else self.weight.itemsize
        return _with_channels_last(self.image) + _with_channels_last(self.output) + weights

    @property
    def _memory_format(self) -> torch.memory_format:
        """Channels last if image or weight have them last (cudnn_conv_suggest_memory_format)."""
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(self.image.dim())
        if last is not None and any(_has(tensor, last) for tensor in (self.image, self.weight)):
            return last
        return torch.contiguous_format


def _on_tensor_cores(target: Target, kind: torch.dtype) -> bool:
    if kind in _HALF:
        return target.capability >= (7, 0)
    return kind is torch.float32 and target.capability >= (8, 0) and torch.backends.cudnn.allow_tf32


def _with_channels_last(tensor: Tensor) -> int:
    pixels = math.prod((tensor.shape[0], *tensor.shape[2:]))
    return int(pixels * up(tensor.shape[1] * tensor.itemsize, CHANNEL_GROUP))


def _has(tensor: Tensor, last: torch.memory_format) -> bool:
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
