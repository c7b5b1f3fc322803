"""The attention kernel a GPU chooses, by the rules of pytorch's sdp_utils.cpp, and what it keeps for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autobalance.kernels.versions import release
from tests.kernels.tracing import DEVICE, operand, trace

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUPED_IN_FLOAT = "efficient" if release() >= (2, 14) else "math"
BATCH, HEADS, LENGTH = 2, 4, 100


def attention(
    dtype: torch.dtype = BF16, head: int = 64, keys: int = LENGTH, key_heads: int = HEADS, **options: Any
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        query = operand(BATCH, HEADS, LENGTH, head, dtype=dtype)
        key, value = (operand(BATCH, key_heads, keys, head, dtype=dtype) for _ in range(2))
        given = {name: option() if callable(option) else option for name, option in options.items()}
        return F.scaled_dot_product_attention(query, key, value, **given)

    return run


def chosen(target: str, run: Callable[[], Tensor]) -> str:
    names = trace(target, run).names
    kernels = [name for name in names if name.startswith("_scaled_dot_product") and "backward" not in name]
    return kernels[0].removeprefix("_scaled_dot_product_").removesuffix("_attention") if kernels else "math"


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> Callable[[], Tensor]:
    return lambda: torch.ones(*shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("target", "run", "expected"),
    [
        ("A100-80GB", attention(), "flash"),
        ("A100-80GB", attention(FP16, is_causal=True), "flash"),
        ("A100-80GB", attention(FP32), "efficient"),
        ("A100-80GB", attention(torch.float64), "math"),
        ("A100-80GB", attention(attn_mask=mask(LENGTH, LENGTH)), "efficient"),
        ("A100-80GB", attention(key_heads=2, enable_gqa=True), "flash"),
        ("A100-80GB", attention(FP32, key_heads=2, enable_gqa=True), GROUPED_IN_FLOAT),
        ("A100-80GB", attention(head=256), "flash"),
        ("A100-80GB", attention(head=264), "efficient"),
        ("A100-80GB", attention(FP32, head=20), "efficient"),
        ("A100-80GB", attention(FP32, head=18), "math"),
        ("A100-80GB", attention(head=20), "flash"),
        ("A100-80GB", attention(keys=50, is_causal=True), "efficient"),
        ("RTX4090", attention(head=200), "efficient"),
        ("RTX4090", attention(head=256), "flash"),
        ("RTX4090", attention(head=256, dropout_p=0.1), "efficient"),
        ("A100-80GB", attention(head=200), "flash"),
        ("V100-16GB", attention(BF16), "math"),
        ("V100-16GB", attention(FP16), "efficient"),
        ("V100-16GB", attention(FP32), "efficient"),
        ("V100-16GB", attention(FP32, head=18), "efficient"),
        ("T4", attention(FP16, key_heads=2, enable_gqa=True), GROUPED_IN_FLOAT),
        ("H100-80GB", attention(), "cudnn"),
        ("H100-80GB", attention(head=256), "flash"),
        ("H100-80GB", attention(dropout_p=0.1), "flash"),
        ("H100-80GB", attention(dropout_p=0.125), "cudnn"),
        ("H100-80GB", attention(FP32), "efficient"),
        ("H100-80GB", attention(attn_mask=mask(LENGTH, LENGTH)), "cudnn"),
    ],
)
def test_gpu_chooses_as_torch_says(target: str, run: Callable[[], Tensor], expected: str) -> None:
    assert chosen(target, run) == expected


def test_kernels_that_the_user_switched_off_are_not_chosen() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert chosen("A100-80GB", attention()) == "math"
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert chosen("A100-80GB", attention()) == "efficient"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert chosen("H100-80GB", attention()) == "efficient"


def test_nothing_that_is_switched_on_is_an_error_that_says_what_to_allow() -> None:
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(
            RuntimeError, match=r"query \(2, 4, 100, 64\) of torch.float32 on A100-80GB; allow SDPBackend.MATH"
        ),
    ):
        trace("A100-80GB", attention(FP32))


def test_flash_keeps_the_result_and_a_number_for_each_row() -> None:
    of_tensor, rows = BATCH * HEADS * LENGTH * 64 * 2, BATCH * HEADS * LENGTH * 4
    seeds = [16, 8]
    assert sorted(trace("A100-80GB", attention()).kept) == sorted([*[of_tensor] * 4, rows, *seeds])


def test_efficient_pads_the_number_of_rows_to_thirty_two() -> None:
    of_tensor, rows = BATCH * HEADS * LENGTH * 64 * 4, BATCH * HEADS * 128 * 4
    kept = trace("A100-80GB", attention(FP32)).kept
    assert sorted(kept) == sorted([*[of_tensor] * 4, rows, 8, 8])


def test_forward_without_gradients_keeps_no_rows() -> None:
    with torch.no_grad():
        kept = trace("A100-80GB", attention(FP32), backward=False).kept
    assert kept == [BATCH * HEADS * LENGTH * 64 * 4]


def test_heads_that_are_no_multiple_of_eight_are_padded_for_flash() -> None:
    seen = trace("A100-80GB", attention(head=20), backward=False)
    assert seen.names.count("constant_pad_nd") == 3
    # The unpadded operands, and padded to 24: query, key, value, result.
    size = BATCH * HEADS * LENGTH * 2
    assert [nbytes for nbytes in seen.kept if nbytes > 4000] == [20 * size] * 3 + [24 * size] * 4


def test_boolean_mask_becomes_an_additive_one_whose_rows_are_padded() -> None:
    kept = trace("A100-80GB", attention(attn_mask=mask(BATCH, 1, LENGTH, LENGTH))).kept
    assert BATCH * LENGTH * 104 * 2 in kept
    assert BATCH * LENGTH * LENGTH * 2 not in kept


def test_autocast_casts_before_the_choice() -> None:
    def run() -> Tensor:
        with torch.autocast("simulated", dtype=BF16):
            return attention(FP32)().float()

    assert chosen("A100-80GB", run) == "flash"
    assert chosen("V100-16GB", run) == "math"


def test_simulated_target_keeps_its_own_kernels_and_nothing_stays_behind() -> None:
    assert chosen("simulated", attention()) == "math"
    assert chosen("A100-80GB", attention()) == "flash"
    assert chosen("simulated", attention()) == "math"
