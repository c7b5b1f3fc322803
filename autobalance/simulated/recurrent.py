"""Fused cells of LSTM and GRU, which torch picks for an accelerator and the CPU does not have, and packed sequences.

Formulas and layout of the workspaces are those of torch's CUDA kernels (aten/src/ATen/native/cuda/RNN.cu).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autobalance.simulated import elements, fakes
from autobalance.simulated.dispatch import Call, carry_out, emulate

_aten = torch.ops.aten


def register() -> None:
    """Let the cells be carried out by the functions below."""
    emulate(_aten._thnn_fused_lstm_cell.default, lstm_cell)
    emulate(_aten._thnn_fused_lstm_cell_backward_impl.default, lstm_cell_backward)
    emulate(_aten._thnn_fused_gru_cell.default, gru_cell)
    emulate(_aten._thnn_fused_gru_cell_backward.default, gru_cell_backward)
    carry_out(_aten._pack_padded_sequence.default, _pack_padded_sequence)


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of an LSTM: new hidden state, new cell state, and the gates kept for the backward.

    Args:
        input_gates, hidden_gates: `[batch, 4 * size]`, before the biases.
        cell: `[batch, size]`, the old cell state.
        input_bias, hidden_bias: `[4 * size]`, if there are biases.
    """
    gates = _wide(input_gates) + _wide(hidden_gates)
    if input_bias is not None and hidden_bias is not None:
        gates = gates + _wide(input_bias) + _wide(hidden_bias)
    entry, forget, update, output = gates.chunk(4, 1)
    entry, forget, update, output = entry.sigmoid(), forget.sigmoid(), update.tanh(), output.sigmoid()
    new_cell = forget * _wide(cell) + entry * update
    hidden = output * new_cell.tanh()
    workspace = torch.cat([entry, forget, update, output], 1)
    return hidden.to(cell.dtype), new_cell.to(cell.dtype), workspace.to(input_gates.dtype)


def lstm_cell_backward(
    grad_hidden: Tensor | None,
    grad_new_cell: Tensor | None,
    cell: Tensor,
    new_cell: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the gates, of the old cell state, and of the bias.

    Args:
        grad_hidden, grad_new_cell: `[batch, size]`; None: no gradient.
        cell, new_cell: `[batch, size]`, before and after the step.
        workspace: the gates, as `lstm_cell` kept them.
        has_bias: whether there are biases.
    """
    if grad_hidden is None and grad_new_cell is None:
        return None, None, None
    entry, forget, update, output = _wide(workspace).chunk(4, 1)
    squashed = _wide(new_cell).tanh()
    grad_cell = torch.zeros_like(squashed) if grad_new_cell is None else _wide(grad_new_cell)
    grad_output = torch.zeros_like(output)
    if grad_hidden is not None:
        grad_cell = grad_cell + _wide(grad_hidden) * output * (1 - squashed * squashed)
        grad_output = _wide(grad_hidden) * squashed
    grad_gates = torch.cat(
        [
            grad_cell * update * entry * (1 - entry),
            grad_cell * _wide(cell) * forget * (1 - forget),
            grad_cell * entry * (1 - update * update),
            grad_output * output * (1 - output),
        ],
        1,
    ).to(workspace.dtype)
    return grad_gates, (grad_cell * forget).to(cell.dtype), grad_gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of a GRU: new hidden state, and what is kept for the backward.

    Args:
        input_gates, hidden_gates: `[batch, 3 * size]`, before the biases.
        hidden: `[batch, size]`, the old hidden state.
        input_bias, hidden_bias: `[3 * size]`, if there are biases.
    """
    from_input, from_hidden = _wide(input_gates), _wide(hidden_gates)
    if input_bias is not None and hidden_bias is not None:
        from_input, from_hidden = from_input + _wide(input_bias), from_hidden + _wide(hidden_bias)
    reset_in, keep_in, new_in = from_input.chunk(3, 1)
    reset_hidden, keep_hidden, new_hidden = from_hidden.chunk(3, 1)
    reset = (reset_in + reset_hidden).sigmoid()
    keep = (keep_in + keep_hidden).sigmoid()
    new = (new_in + reset * new_hidden).tanh()
    result = new + keep * (_wide(hidden) - new)
    workspace = torch.cat([reset, keep, new, _wide(hidden), new_hidden], 1)
    return result.to(hidden.dtype), workspace.to(input_gates.dtype)


def gru_cell_backward(
    grad_hidden: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the input's gates, the hidden state's gates, the old hidden state, and both biases.

    Args:
        grad_hidden: `[batch, size]`.
        workspace: what `gru_cell` kept.
        has_bias: whether there are biases.
    """
    reset, keep, new, hidden, new_hidden = _wide(workspace).chunk(5, 1)
    grad = _wide(grad_hidden)
    grad_keep = grad * (hidden - new) * (1 - keep) * keep
    grad_new = grad * (1 - keep) * (1 - new * new)
    grad_reset = grad_new * new_hidden * (1 - reset) * reset
    input_gates = torch.cat([grad_reset, grad_keep, grad_new], 1).to(workspace.dtype)
    hidden_gates = torch.cat([grad_reset, grad_keep, grad_new * reset], 1).to(workspace.dtype)
    biases = (input_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return input_gates, hidden_gates, (grad * keep).to(grad_hidden.dtype), *biases


def _wide(value: Tensor) -> Tensor:
    """CUDA's kernels compute half precision in float32."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _pack_padded_sequence(func: Any, args: Any, kwargs: Any) -> tuple[Any, Tensor]:
    """The packed data on the device, and the batch sizes, which recurrent layers read, on the host."""
    padded, lengths, batch_first = args
    if lengths.device.type != "cpu":
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got a tensor on {lengths.device}: give "
            f"`lengths.cpu()`"
        )
    if elements.fake_mode is None:
        batch_sizes: list[Tensor] = []

        def pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> Any:
            data, sizes = _aten._pack_padded_sequence.default(padded, lengths, batch_first)
            batch_sizes.append(sizes)
            return data

        return Call(func, args, kwargs).run(pack), batch_sizes[0]
    real_lengths = fakes.known_of(lengths)
    if real_lengths is None:
        raise RuntimeError("the lengths of a packed sequence are not known while elements are fake")
    # Batch sizes depend on the lengths only: one feature stands for all.
    _, sizes = func(torch.zeros((*padded.shape[:2], 1)), real_lengths, batch_first)
    packed_length = int(sizes.sum())
    result = Call(func, args, kwargs).run(lambda padded, *_: padded.new_empty((packed_length, *padded.shape[2:])))
    return result, sizes
