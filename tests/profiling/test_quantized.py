"""Layers whose weights shrink on their way to a device, against bitsandbytes itself where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autobalance

ROWS, COLUMNS, BATCH = 512, 1024, 256


class Params4bit(nn.Parameter):
    """As bitsandbytes names and describes them."""

    blocksize, compress_statistics, quant_storage, quant_state = 64, True, torch.uint8, None


class Int8Params(nn.Parameter):
    """As bitsandbytes names and describes them."""

    has_fp16_weights = False


class Quantizing(nn.Module):
    """A linear layer of bitsandbytes, as far as its description goes."""

    def __init__(self, kind: type[nn.Parameter], compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = kind(torch.zeros(ROWS, COLUMNS), requires_grad=False)
        self.bias = None
        self.compute_dtype = compute_dtype

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the layer itself does not run in a trial")


def _profile(layer: nn.Module, **options: Any) -> autobalance.Profile:
    model = nn.Sequential(nn.Linear(COLUMNS, COLUMNS), layer, nn.Linear(ROWS, 8))
    return autobalance.profile(model, torch.zeros(BATCH, COLUMNS), target="simulated", **options)


def test_four_bits_hold_half_a_byte_for_each_weight_and_scales_for_each_block() -> None:
    count = ROWS * COLUMNS
    blocks = count // 64
    # Packed weights; 8-bit scales; a scale for 256 of those; the tables of 256 and 16 numbers; an offset.
    expected = count // 2 + blocks + 512 + 4 * 256 + 512 + 512  # small ones fill a piece of 512 bytes
    profile = _profile(Quantizing(Params4bit, torch.bfloat16))
    assert profile.blocks[1].weights == expected
    assert "1 layer(s) of bitsandbytes are counted at the size of their quantised weights" in profile.notes[0]


def test_eight_bits_hold_a_byte_for_each_weight_and_a_scale_for_each_row() -> None:
    profile = _profile(Quantizing(Int8Params))
    assert profile.blocks[1].weights == ROWS * COLUMNS + 4 * ROWS


def test_the_full_weight_is_there_in_forward_and_backward_but_is_not_kept() -> None:
    (_, row, _) = _profile(Quantizing(Params4bit, torch.bfloat16)).blocks
    full = ROWS * COLUMNS * 2
    given = BATCH * COLUMNS * 2  # the input in the layer's own precision
    assert row.forward_transient >= full
    assert row.backward_transient >= full
    assert row.saved < full + given


class Scaled(torch.Tensor):
    """A weight of 8-bit numbers and a scale for each row, as libraries for quantisation build them."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=scale.dtype, device=numbers.device, requires_grad=False
        )
        return made

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return cls(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *rest = args
            return F.linear(x, weight.numbers.to(x.dtype) * weight.scale, *rest)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise AssertionError(f"{func} is not for a weight of this kind")


def test_a_weight_made_of_several_tensors_is_counted_by_what_it_is_made_of() -> None:
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    numbers = torch.zeros(ROWS, COLUMNS, dtype=torch.int8)
    layer.weight = nn.Parameter(Scaled(numbers, torch.ones(ROWS, 1)), requires_grad=False)
    row = _profile(layer).blocks[1]
    assert row.weights == ROWS * COLUMNS + 4 * ROWS
    assert row.forward_transient >= 4 * ROWS * COLUMNS  # the product takes the weight in full


def test_the_spike_while_quantising_counts() -> None:
    with torch.device("meta"):
        alone = nn.Sequential(Quantizing(Params4bit, torch.bfloat16))
    profile = autobalance.profile(alone, torch.zeros(1, COLUMNS), target="simulated", training=False)
    full, packed = ROWS * COLUMNS * 4, ROWS * COLUMNS // 2
    assert full + packed < profile.peak() < full + 1.1 * packed


@pytest.mark.parametrize("kind", ["4 bits", "4 bits, plain scales", "8 bits"])
def test_sizes_are_those_of_bitsandbytes(kind: str) -> None:
    library = pytest.importorskip("bitsandbytes.nn", exc_type=ImportError)
    if kind == "8 bits":
        layer = library.Linear8bitLt(COLUMNS, ROWS, bias=False, has_fp16_weights=False)
    else:
        layer = library.Linear4bit(COLUMNS, ROWS, bias=False, compress_statistics=kind == "4 bits", quant_type="nf4")
    counted = _profile(layer).blocks[1].weights
    weight = layer.to("cpu").weight
    if kind == "8 bits":
        held = [weight.data, torch.empty(ROWS)]
    else:
        state = weight.quant_state
        held = [weight.data, state.absmax, state.code]
        if state.nested:
            held += [state.state2.absmax, state.state2.code, state.offset]
    assert counted == sum(-(-tensor.untyped_storage().nbytes() // 512) * 512 for tensor in held)
