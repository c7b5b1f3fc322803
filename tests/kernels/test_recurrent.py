"""Recurrent layers by cuDNN: shapes by RNN.cpp; what cuDNN keeps by the numbers that the backward of a step needs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.tracing import DEVICE, Seen, operand, trace

LENGTH, BATCH, INPUT, HIDDEN = 10, 4, 32, 48


def layer(kind: Any = nn.LSTM, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    model = kind(INPUT, HIDDEN, dtype=dtype, **options).to(DEVICE)
    result: Tensor = model(operand(LENGTH, BATCH, INPUT, dtype=dtype))[0]
    return result


def traced(kind: Any = nn.LSTM, **options: Any) -> Seen:
    return trace("A100-80GB", partial(layer, kind, **options))


@pytest.mark.parametrize(("kind", "kept"), [(nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 2)])
def test_layer_is_one_kernel_that_keeps_gates_state_and_output_of_each_step(kind: Any, kept: int) -> None:
    seen = traced(kind)
    assert seen.names.count("_cudnn_rnn") == 1
    assert seen.names.count("_cudnn_rnn_backward") == 1
    assert kept * LENGTH * BATCH * HIDDEN * 4 in seen.kept


def test_workspace_holds_the_gates_of_all_steps() -> None:
    seen = traced()
    gates = 4 * LENGTH * BATCH * HIDDEN * 4
    assert seen.taken["_cudnn_rnn"].transient == gates
    assert seen.taken["_cudnn_rnn_backward"].transient == gates
    assert seen.taken["_cudnn_rnn"].is_allowance
    assert traced(bidirectional=True).taken["_cudnn_rnn"].transient == 2 * gates


def test_layers_directions_and_dropout_between_layers_are_kept_too() -> None:
    each = LENGTH * BATCH * HIDDEN * 4
    assert 2 * 2 * 6 * each in traced(num_layers=2, bidirectional=True).kept
    masks = LENGTH * BATCH * HIDDEN * 4
    assert 2 * 6 * each + masks in traced(num_layers=2, dropout=0.1).kept


def test_evaluation_keeps_nothing_for_the_backward() -> None:
    def run() -> Tensor:
        with torch.no_grad():
            return nn.LSTM(INPUT, HIDDEN).to(DEVICE).eval()(operand(LENGTH, BATCH, INPUT))[0]

    assert trace("A100-80GB", run, backward=False).kept == [LENGTH * BATCH * HIDDEN * 4]


def test_gradients_of_weights_are_parts_of_one_storage() -> None:
    weights = 4 * HIDDEN * (INPUT + HIDDEN) + 2 * 4 * HIDDEN
    seen, model = [], nn.LSTM(INPUT, HIDDEN)

    def run() -> Tensor:
        there = model.to(DEVICE)
        there(operand(LENGTH, BATCH, INPUT))[0].sum().backward()
        seen.extend(parameter.grad.untyped_storage().nbytes() for parameter in there.parameters())
        return torch.zeros((), device=DEVICE)

    trace("A100-80GB", run, backward=False)
    assert seen == [weights * 4] * 4


def test_cudnn_takes_no_bfloat16_and_none_where_the_user_switched_it_off() -> None:
    assert "_cudnn_rnn" not in traced(dtype=torch.bfloat16).names
    assert "_cudnn_rnn" in traced(dtype=torch.float16).names
    with torch.backends.cudnn.flags(enabled=False):
        assert "_cudnn_rnn" not in traced().names


def test_autocast_casts_weights_once_a_call_and_not_once_a_step() -> None:
    def run() -> Tensor:
        with torch.autocast("simulated", dtype=torch.float16):
            return layer().float()

    seen = trace("A100-80GB", run)
    assert "_cudnn_rnn" in seen.names
    assert seen.names[: seen.names.index("_cudnn_rnn")].count("_to_copy") == 7  # input, both states, four weights


def test_packed_sequences_run_in_one_kernel_too() -> None:
    def run() -> Tensor:
        model = nn.LSTM(INPUT, HIDDEN).to(DEVICE)
        packed = nn.utils.rnn.pack_padded_sequence(operand(LENGTH, BATCH, INPUT), torch.tensor([10, 9, 3, 1]))
        result: Tensor = model(packed)[0].data
        return result

    seen = trace("A100-80GB", run)
    assert seen.names.count("_cudnn_rnn") == 1
    assert 6 * 23 * HIDDEN * 4 in seen.kept  # 23 steps in all
