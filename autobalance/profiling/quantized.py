"""Weights that shrink when they reach the device: linear layers of bitsandbytes, in 4 and in 8 bits.

On the host such a layer still has its full weight; moving it to a GPU quantises it there. The trial uses layers that
hold what the device then holds, and that take in forward and backward what the library's functions take: a weight in
4 bits is written out in full for each product, one in 8 bits only in the backward.

Sizes follow bitsandbytes: `functional.quantize_4bit`, `nn.modules.Params4bit`, `nn.modules.Int8Params`,
`autograd._functions.MatMul4Bit` and `MatMul8bitLt`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autobalance.compat import parameter_table
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.world import World

_NESTED_BLOCK = 256  # scales that share a scale of their own
_CODE_4_BIT, _CODE_8_BIT = 16, 256  # entries of the tables of numbers that quantised values stand for


@dataclass(frozen=True)
class Quantized:
    """What a quantised weight is on the device.

    Attributes:
        bits: 4 or 8.
        shape: rows and columns of the weight.
        tensors: shape and data type of all that stays, the packed weight first.
        before: bytes of the weight as it arrives, which are there beside it while it is quantised.
    """

    bits: int
    shape: tuple[int, int]
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    before: int


def quantized_layers(root: nn.Module) -> Iterator[tuple[nn.Module, Quantized]]:
    """The linear layers of a model whose weights are quantised on their way to a device, or are already.

    Args:
        root: the model.
    """
    for module in root.modules():
        found = _described(module)
        if found is not None:
            yield module, found


def _described(module: nn.Module) -> Quantized | None:
    weight = parameter_table(module).get("weight")
    kind = type(weight).__name__
    if kind == "Params4bit" and isinstance(weight, Tensor):
        return _four_bits(module, weight)
    if kind == "Int8Params" and isinstance(weight, Tensor) and not getattr(weight, "has_fp16_weights", True):
        rows, columns = weight.shape
        tensors = (((rows, columns), torch.int8), ((rows,), torch.float32))
        before = 0 if weight.dtype is torch.int8 else rows * columns * 2  # it travels as float16
        return Quantized(8, (rows, columns), tensors, before)
    return None


def _four_bits(module: nn.Module, weight: Any) -> Quantized:
    state: Any = getattr(weight, "quant_state", None)
    is_packed = state is not None
    rows, columns = state.shape if is_packed else weight.shape
    count = rows * columns
    block = state.blocksize if is_packed else weight.blocksize
    nested = state.nested if is_packed else weight.compress_statistics
    storage = getattr(weight, "quant_storage", torch.uint8)
    packed = math.ceil(count / 2 / storage.itemsize)
    scales = math.ceil(count / block)
    tensors: list[tuple[tuple[int, ...], torch.dtype]] = [((packed, 1), storage)]
    if nested:
        tensors += [
            ((scales,), torch.uint8),
            ((math.ceil(scales / _NESTED_BLOCK),), torch.float32),
            ((_CODE_8_BIT,), torch.float32),
            ((), torch.float32),
        ]
    else:
        tensors.append(((scales,), torch.float32))
    tensors.append(((_CODE_4_BIT,), torch.float32))
    return Quantized(4, (rows, columns), tuple(tensors), 0 if is_packed else count * weight.element_size())


class QuantizedLinear(nn.Module):
    """Stands in a trial for a linear layer whose weight is quantised.

    Args:
        layer: the layer; not changed.
        quantized: its weight.
        make: makes one of the trial's tensors like a tensor on meta or on the host.
    """

    def __init__(self, layer: Any, quantized: Quantized, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.quantized = quantized
        self.compute_dtype: torch.dtype | None = getattr(layer, "compute_dtype", None)
        for index, (shape, dtype) in enumerate(quantized.tensors):
            made = make(torch.empty(shape, dtype=dtype, device="meta"))
            name = "weight" if index == 0 else f"scale_{index}"
            self.register_parameter(name, nn.Parameter(made, requires_grad=False))
        bias = layer.bias
        trained = bias is not None and bias.requires_grad
        self.bias = None if bias is None else nn.Parameter(make(bias.detach()), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        """The product, in the layer's own precision."""
        if self.quantized.bits == 8:
            product: Tensor = _Product8Bit.apply(x, self.weight, self.bias, self.quantized)  # type: ignore[no-untyped-call]  # torch's own
            return product
        given = x.dtype
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        result: Tensor = _Product4Bit.apply(x, self.weight, bias, self.quantized)  # type: ignore[no-untyped-call]  # torch's own
        return result.to(given)


class _Product4Bit(torch.autograd.Function):
    """Writes the weight out in full for the product, and once more for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, quantized: Quantized) -> Tensor:
        ctx.packed, ctx.quantized, ctx.dtype = packed, quantized, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, packed.new_empty(quantized.shape, dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        bias = _bias_gradient(gradient, ctx)
        weight = ctx.packed.new_empty(ctx.quantized.shape, dtype=gradient.dtype)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, bias, None


class _Product8Bit(torch.autograd.Function):
    """Multiplies in 8 bits, and writes the weight out in full for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, quantized: Quantized) -> Tensor:
        ctx.packed, ctx.quantized = packed, quantized
        ctx.bias_dtype = None if bias is None else bias.dtype
        rows = x.reshape(-1, x.shape[-1])
        ctx.rows = rows if ctx.needs_input_grad[0] else None
        half = rows.to(torch.float16)
        whole, scales = half.new_empty(half.shape, dtype=torch.int8), half.new_empty(len(half), dtype=torch.float32)
        product = whole.new_empty((len(rows), quantized.shape[0]), dtype=torch.int32)
        result = scales.new_empty(product.shape, dtype=torch.float16).to(x.dtype)
        if bias is not None and x.dtype is not torch.float16:
            result = result.add_(bias)
        return result.reshape(*x.shape[:-1], quantized.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        bias = _bias_gradient(gradient, ctx)
        if not ctx.needs_input_grad[0]:
            return None, None, bias, None
        weight = ctx.packed.to(ctx.rows.dtype).mul_(1.0)
        return gradient @ weight, None, bias, None


def _bias_gradient(gradient: Tensor, ctx: Any) -> Tensor | None:
    if not ctx.needs_input_grad[2]:
        return None
    return gradient.reshape(-1, gradient.shape[-1]).sum(0, dtype=ctx.bias_dtype)


def quantized_stand_ins(
    root: nn.Module, spot_of: Callable[[Tensor], tuple[int, int]], world: World, tracer: Tracer
) -> dict[int, QuantizedLinear]:
    """What stands in a trial for the layers whose weights are quantised, by the layer's id.

    Args:
        root: the user's model.
        spot_of: device index and account of one of its tensors.
        world: makes the trial's tensors.
        tracer: is told what quantising takes.
    """
    stand_ins = {}
    for layer, quantized in quantized_layers(root):
        index, account = spot_of(layer.get_parameter("weight"))
        if quantized.before:  # both are there until the full one is dropped
            packed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in quantized.tensors)
            tracer.transient(quantized.before + packed, account, "quantising a weight")
        stand_ins[id(layer)] = QuantizedLinear(layer, quantized, partial(world.on_device, index=index, account=account))
    return stand_ins
