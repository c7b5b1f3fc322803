"""Normalisations: one kernel or several, and float32 statistics for half precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autobalance.kernels.versions import assuming
from tests.kernels.tracing import operand, trace

ROWS, WIDTH = 1000, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_one_kernel_that_keeps_a_float_for_each_row(dtype: torch.dtype) -> None:
    seen = trace(
        "A100-80GB", lambda: F.rms_norm(operand(ROWS, WIDTH, dtype=dtype), (WIDTH,), operand(WIDTH, dtype=dtype))
    )
    assert "_fused_rms_norm" in seen.names
    assert "_fused_rms_norm_backward" in seen.names
    whole = ROWS * WIDTH * dtype.itemsize
    assert sorted(seen.kept) == sorted([whole, WIDTH * dtype.itemsize, whole, ROWS * 4])


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
def test_rms_norm_with_a_weight_of_another_type_is_several_operations() -> None:
    seen = trace("A100-80GB", lambda: F.rms_norm(operand(ROWS, WIDTH, dtype=torch.bfloat16), (WIDTH,), operand(WIDTH)))
    assert "_fused_rms_norm" not in seen.names
    assert "rsqrt" in seen.names


def test_layer_norm_of_half_precision_keeps_float_statistics() -> None:
    half = torch.bfloat16
    parts = [(ROWS, WIDTH), (WIDTH,), (WIDTH,)]
    seen = trace("A100-80GB", lambda: _layer_norm([operand(*shape, dtype=half) for shape in parts]))
    assert sorted(seen.kept) == sorted([ROWS * WIDTH * 2, WIDTH * 2, WIDTH * 2, ROWS * WIDTH * 2, ROWS * 4, ROWS * 4])


def _layer_norm(operands: list[torch.Tensor]) -> torch.Tensor:
    value, weight, bias = operands
    return F.layer_norm(value, (WIDTH,), weight, bias)


def test_batch_norm_keeps_mean_and_deviation_of_each_channel() -> None:
    """As cudnn_batch_norm and native_batch_norm alike."""
    seen = trace("A100-80GB", lambda: F.batch_norm(operand(4, 8, 6, 6), None, None, operand(8), operand(8), True))
    whole = 4 * 8 * 6 * 6 * 4
    assert sorted(seen.kept) == sorted([whole, whole, *[8 * 4] * 4])


COPIED = {"straight": (0, 0), "transposed": (1, 1)}
"""Copies before the kernel, forward and backward, in releases before 2.14."""


@pytest.mark.parametrize("target", ["simulated", "A100-80GB"])
@pytest.mark.parametrize("kind", COPIED)
def test_group_norm_copies_what_is_not_contiguous_as_the_assumed_release_does(kind: str, target: str) -> None:
    def run() -> torch.Tensor:
        value = operand(4, 6, 8)
        result = F.group_norm(value.transpose(1, 2) if kind == "transposed" else operand(4, 8, 6), 2)
        return result.transpose(1, 2).contiguous() if kind == "transposed" else result

    with assuming((2, 13)):
        names = trace(target, run).names
    before, _, after = "/".join(names).partition("native_group_norm/")
    ours = after.partition("/native_group_norm_backward")[0].rpartition("transpose")[2]
    assert (before.count("clone"), ours.count("clone")) == COPIED[kind]


def test_group_norm_of_a_channels_last_image_is_contiguous_on_a_gpu_before_2_14() -> None:
    strides = []

    def run() -> torch.Tensor:
        image = operand(2, 8, 6, 6).to(memory_format=torch.channels_last)
        result = F.group_norm(image, 2)
        strides.append(result.stride())
        return result

    with assuming((2, 13)):
        trace("simulated", run)
        trace("A100-80GB", run)
    assert strides == [(288, 1, 48, 8), (288, 36, 6, 1)]
