"""Normalisations: one kernel or several, and float32 statistics for half precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
