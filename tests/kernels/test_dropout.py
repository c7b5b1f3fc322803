"""Dropout as torch carries it out on a GPU: Dropout.cpp, is_fused_kernel_acceptable."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.kernels.tracing import operand, trace

WHOLE = 100 * 64 * 4


def test_dropout_keeps_a_boolean_mask() -> None:
    seen = trace("A100-80GB", lambda: F.dropout(operand(100, 64), 0.1))
    assert "native_dropout" in seen.names
    assert seen.kept == [WHOLE, WHOLE, 100 * 64]


def test_dropout_of_nothing_and_in_evaluation_makes_nothing() -> None:
    assert trace("A100-80GB", lambda: F.dropout(operand(100, 64), 0.0)).kept == [WHOLE]
    assert trace("A100-80GB", lambda: F.dropout(operand(100, 64), 0.1, training=False)).kept == [WHOLE]


def test_dropout_of_everything_is_a_product_with_zero() -> None:
    assert trace("A100-80GB", lambda: F.dropout(operand(100, 64), 1.0)).kept == [WHOLE, 4, WHOLE]


def test_dropout_of_features_keeps_a_number_for_each() -> None:
    seen = trace("A100-80GB", lambda: F.dropout2d(operand(10, 6, 8, 8), 0.1))
    assert seen.kept == [10 * 6 * 64 * 4, 10 * 6 * 4, 10 * 6 * 64 * 4]


def test_dropout_in_place_keeps_noise_of_the_input_type() -> None:
    def run() -> torch.Tensor:
        return F.dropout(operand(100, 64) * 1, 0.1, inplace=True)

    assert trace("A100-80GB", run).kept == [WHOLE, WHOLE, WHOLE]
