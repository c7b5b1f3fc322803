"""What kernels take inside, against the formulas of pytorch's sources, worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autobalance.kernels import attention_scratch
from autobalance.kernels.scratch import NOTHING
from autobalance.kernels.target import find_target
from autobalance.kernels.versions import release
from tests.kernels.tracing import DEVICE, Seen, operand, trace

A100, V100 = find_target("A100-80GB"), find_target("V100-16GB")
BF16 = torch.bfloat16


def by_length(batch: int, length: int, heads: int, head: int, dtype: torch.dtype = BF16) -> Tensor:
    """Query, key or value as a linear layer and a transpose leave it."""
    return operand(batch, length, heads, head, dtype=dtype).transpose(1, 2)


def attention(dtype: torch.dtype = BF16, key_heads: int = 4, head: int = 64) -> Seen:
    def run() -> Tensor:
        query = by_length(2, 300, 4, head, dtype)
        key, value = (by_length(2, 300, key_heads, head, dtype) for _ in range(2))
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=key_heads < 4).transpose(1, 2)

    return trace("A100-80GB", run)


FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"
# softmax_d [2, 4, 384] and dq_accum [2, 384, 4, 64], float32: 300 queries round up to 384.
ROWS_AND_QUERIES = 2 * 4 * 384 * 4 + 2 * 384 * 4 * 64 * 4


def test_flash_backward_takes_queries_in_float_and_a_number_for_each_row() -> None:
    assert attention().taken[FLASH_BACKWARD].transient == ROWS_AND_QUERIES


def test_flash_backward_of_grouped_heads_takes_keys_and_values_of_every_head() -> None:
    assert attention(key_heads=2).taken[FLASH_BACKWARD].transient == ROWS_AND_QUERIES + 2 * (2 * 300 * 4 * 64 * 2)


def test_flash_backward_rounds_the_head_up() -> None:
    rows = 2 * 4 * 384 * 4
    assert attention(head=80).taken[FLASH_BACKWARD].transient == rows + 2 * 384 * 4 * 96 * 4
    assert attention(head=136).taken[FLASH_BACKWARD].transient == rows + 2 * 384 * 4 * 192 * 4


def test_flash_backward_copies_what_does_not_lie_by_length() -> None:
    def run() -> Tensor:
        return F.scaled_dot_product_attention(*(operand(2, 4, 300, 64, dtype=BF16) for _ in range(3)))

    taken = trace("A100-80GB", run).taken[FLASH_BACKWARD].transient
    assert taken == ROWS_AND_QUERIES + 2 * (2 * 4 * 300 * 64 * 2)  # the gradient and the result


def test_flash_forward_splits_keys_where_little_can_be_shared_out() -> None:
    # 8 heads x 8 tiles of 64 queries = 64 shares for 216 slots, 8 tiles of 256 keys. Waves filled by 1 to 4, 8 splits:
    # 64/216, 128/216, 192/216 = 0.89, 256/432, 512/648 = 0.79; three splits are the best.
    query, key = torch.empty(1, 8, 512, 64, device="meta"), torch.empty(1, 8, 2048, 64, device="meta")
    expected = 3 * 8 * 512 * 4 + 3 * 8 * 512 * 64 * 4
    assert attention_scratch.flash_forward(A100, release(), query, key, key) == expected
    assert attention_scratch.flash_forward(A100, release(), query, key, key, 0.1) == 0
    wide = torch.empty(8, 8, 512, 64, device="meta")
    assert attention_scratch.flash_forward(A100, release(), wide, wide, wide) == 0


def test_efficient_forward_of_wide_heads_in_half_precision_takes_its_result_in_float() -> None:
    for head, taken in ((128, 0), (136, 2 * 4 * 300 * 136 * 4)):
        query = torch.empty(2, 4, 300, head, dtype=torch.float16, device="meta")
        assert attention_scratch.efficient_forward(V100, release(), query, query, query) == taken
    wide = torch.empty(2, 4, 300, 136, device="meta")
    assert attention_scratch.efficient_forward(V100, release(), wide, wide, wide) == 0


def test_efficient_backward_in_float_takes_products_or_tiles_with_locks() -> None:
    taken = attention(torch.float32).taken["_scaled_dot_product_efficient_attention_backward"].transient
    rows = 2 * 4 * 300 * 4 + 512 - 2 * 4 * 300 * 4 % 512  # 9600 rounds up to 9728
    # 8 heads x 5 tiles of 64 queries x 1 of 64 columns, each 64 x 64 floats, a lock, a counter, padding: 16400 bytes.
    tiles = 8 * 5 * 16400
    tiles += 512 - tiles % 512
    assert taken == rows + tiles


def test_efficient_backward_on_an_old_gpu_keeps_keys_and_values_of_wide_heads_in_memory() -> None:
    query = torch.empty(1, 300, 2, 128, dtype=torch.float16, device="meta").transpose(1, 2)
    taken = attention_scratch.efficient_backward(V100, release(), query, query, query, query, None, query)
    rows = 2560  # 2 x 300 x 4 = 2400, rounded
    # V100 takes the tile of 128 x 64 for heads of 128: registers hold the keys' gradient, so only the queries' is kept:
    # 3 tiles of 128 queries x 2 of 64 columns, 128 x 64 floats and 16 bytes.
    assert taken == rows + _up(2 * 3 * 2 * (128 * 64 * 4 + 16))
    wide = torch.empty(1, 300, 2, 256, dtype=torch.float16, device="meta").transpose(1, 2)
    taken = attention_scratch.efficient_backward(V100, release(), wide, wide, wide, wide, None, wide)
    # Heads of 256 do not fit: 5 splits of 64 keys x 256 columns, for keys and for values, beside 3 x 4 tiles.
    kept = 2 * 5 * 64 * 256 * 4
    assert taken == rows + _up(2 * (3 * 4 * (128 * 64 * 4 + 16) + kept))


def _up(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def test_masked_softmax_takes_itself_and_the_mask() -> None:
    def run() -> Tensor:
        return torch.ops.aten._safe_softmax(operand(8, 64, 64), -1)

    assert trace("A100-80GB", run).taken["_safe_softmax"].transient == 8 * 64 * 64 * 4 + 8 * 64 * 64


def test_embedding_backward_takes_sorted_indices_and_partial_sums() -> None:
    def run() -> Tensor:
        return F.embedding(torch.zeros(4096, dtype=torch.long, device=DEVICE), operand(50000, 256))

    taken = trace("A100-80GB", run).taken["embedding_dense_backward"].transient
    partial = 4096 // 10 + 4096  # rows of ten, and one for each of at most 4096 different indices
    by_index = 3 * 4096 * 8 + 2 * 4096 * 8 + _up(partial * 8) + 2 * 512
    assert taken == by_index + partial * 256 * 4


def test_embedding_backward_of_few_indices_takes_nothing() -> None:
    def run() -> Tensor:
        return F.embedding(torch.zeros(3072, dtype=torch.long, device=DEVICE), operand(50000, 256))

    assert trace("A100-80GB", run).taken["embedding_dense_backward"].transient == 0


def test_embedding_backward_of_a_small_vocabulary_adds_up_in_place() -> None:
    def run() -> Tensor:
        return F.embedding(torch.zeros(4096, dtype=torch.long, device=DEVICE), operand(65, 256))

    taken = trace("A100-80GB", run).taken["embedding_dense_backward"].transient
    partial = 4096 // 10 + 65
    assert taken == 3 * 4096 * 8 + 2 * _up(65 * 8) + 2 * _up(partial * 8) + 2 * 512


def test_cross_entropy_with_logits_takes_two_results_before_the_mean() -> None:
    def run() -> Tensor:
        return F.binary_cross_entropy_with_logits(operand(100, 64), torch.zeros(100, 64, device=DEVICE))

    assert trace("A100-80GB", run).taken["binary_cross_entropy_with_logits"].transient == 2 * 100 * 64 * 4


def test_matrix_with_gaps_is_copied_for_cublas() -> None:
    gaps = trace("A100-80GB", lambda: torch.mm(operand(64, 64)[::2, ::2], operand(32, 48)), backward=False)
    assert gaps.taken["mm"].transient == 32 * 32 * 4
    for matrix in (lambda: operand(64, 64), lambda: operand(64, 64).t(), lambda: operand(64, 128)[:, :64]):
        other = trace("A100-80GB", lambda matrix=matrix: torch.mm(matrix(), operand(64, 48)), backward=False)
        assert other.taken["mm"].transient == 0


def test_norms_of_many_tensors_take_a_number_for_each_chunk() -> None:
    def run() -> Tensor:
        return torch.nn.utils.get_total_norm([operand(1000, 1000), operand(10)])

    # 1,000,000 numbers are 16 chunks of 65536; every tensor gets as many.
    assert trace("A100-80GB", run, backward=False).taken["_foreach_norm"].transient == 512


@pytest.mark.parametrize("target", ["simulated"])
def test_simulated_target_counts_no_scratch(target: str) -> None:
    seen = trace(target, lambda: torch.mm(operand(64, 64)[::2, ::2], operand(32, 48)))
    assert set(seen.taken.values()) == {NOTHING}
