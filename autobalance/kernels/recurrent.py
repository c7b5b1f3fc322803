"""Recurrent layers by cuDNN: one kernel for all steps and layers, where the CPU runs cell by cell.

Sources: aten/src/ATen/native/cudnn/RNN.cpp (_cudnn_impl, _cudnn_rnn, _cudnn_rnn_backward), torch/backends/cudnn
(CUDNN_TENSOR_DTYPES). cuDNN asks for memory that it keeps from forward to backward, and for a workspace, without saying
how much it will be: both are modelled after the values that the backward of each cell needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autobalance.kernels.bytes import rounded
from autobalance.kernels.target import Target

_aten = torch.ops.aten
_TYPES = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Cell:
    """A kind of cell as cuDNN numbers it.

    Attributes:
        mode: cuDNN's number.
        gates: parts that one product of weights and input gives, each of the hidden size.
        kept: numbers of the hidden size that the backward of one step needs: gates, state, output.
    """

    mode: int
    gates: int
    kept: int


RELU, TANH, LSTM, GRU = Cell(0, 1, 2), Cell(1, 1, 2), Cell(2, 4, 6), Cell(3, 3, 5)
CELLS = {cell.mode: cell for cell in (RELU, TANH, LSTM, GRU)}

_LAYERS = {
    RELU.mode: _aten.rnn_relu,
    TANH.mode: _aten.rnn_tanh,
    LSTM.mode: _aten.lstm,
    GRU.mode: _aten.gru,
}


def is_by_cudnn(value: Tensor) -> bool:
    """Whether cuDNN runs a recurrent layer with this input.

    Args:
        value: what the layer is given.
    """
    return torch.backends.cudnn.enabled and value.dtype in _TYPES and value.numel() > 0


def layer(cell: Cell) -> Callable[..., Any]:
    """What takes the place of a recurrent layer on padded sequences: called with target and the layer's arguments.

    Args:
        cell: of the layer.
    """
    func = _LAYERS[cell.mode].input

    def run(target: Target, value: Tensor, state: Any, weights: Sequence[Tensor], *options: Any) -> Any:
        if not is_by_cudnn(value):
            return func.decompose(value, state, weights, *options)
        *settings, batch_first = options
        return _run(cell, value, state, weights, _Settings(*settings), batch_first, [])

    return run


def packed_layer(cell: Cell) -> Callable[..., Any]:
    """What takes the place of a recurrent layer on packed sequences.

    Args:
        cell: of the layer.
    """
    func = _LAYERS[cell.mode].data

    def run(
        target: Target, value: Tensor, batch_sizes: Tensor, state: Any, weights: Sequence[Tensor], *settings: Any
    ) -> Any:
        if not is_by_cudnn(value):
            return func.decompose(value, batch_sizes, state, weights, *settings)
        return _run(cell, value, state, weights, _Settings(*settings), False, batch_sizes.tolist())

    return run


class _Settings(NamedTuple):
    """What torch's recurrent layers are told in this order, on padded and on packed sequences alike."""

    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool


def _run(
    cell: Cell,
    value: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    settings: _Settings,
    batch_first: bool,
    batch_sizes: list[int],
) -> Any:
    hidden, of_cell = state if cell is LSTM else (state, None)
    projected = 0
    size = hidden.shape[2]
    if of_cell is not None and of_cell.shape[2] != size:
        size, projected = of_cell.shape[2], size
    value, hidden, of_cell, *weights = _cast(value, hidden, of_cell, *weights)
    has_biases, layers, *rest = settings
    stride = (4 if has_biases else 2) + (1 if projected else 0)
    result, hidden, of_cell, _, _ = _aten._cudnn_rnn(
        value,
        weights,
        stride,
        None,
        hidden,
        of_cell,
        cell.mode,
        size,
        projected,
        layers,
        batch_first,
        *rest,
        batch_sizes,
        None,
    )
    return (result, hidden, of_cell) if cell is LSTM else (result, hidden)


def _cast(value: Tensor, *others: Tensor | None) -> list[Any]:
    """All in autocast's type, where it is on: afresh at each call, since the weights are laid out in one piece."""
    kind = value.device.type
    if not torch.is_autocast_enabled(kind):
        return [value, *others]
    lower, keeps = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # as whoever looks on is to know
    try:
        return [tensor if tensor is None else tensor.to(lower) for tensor in (value, *others)]
    finally:
        torch.set_autocast_cache_enabled(keeps)


def forward(
    value: Tensor,
    weights: Sequence[Tensor],
    stride: int,
    buffer: Tensor | None,
    hidden: Tensor,
    of_cell: Tensor | None,
    mode: int,
    size: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """Empty results of `_cudnn_rnn`, with what cuDNN keeps for the backward as the fourth.

    Args:
        value, weights, stride, buffer, hidden, of_cell, mode, size, projected, layers: as the operator has them.
        batch_first, dropout, train, bidirectional, batch_sizes, dropout_state: likewise.
    """
    directions = 2 if bidirectional else 1
    width = directions * (projected or size)
    if batch_sizes:
        result = value.new_empty(value.shape[0], width)
    elif batch_first:
        result = value.new_empty(value.shape[1], value.shape[0], width).transpose(0, 1)
    else:
        result = value.new_empty(*value.shape[:2], width)
    after = value.new_empty(0) if of_cell is None else torch.empty_like(of_cell)
    steps = math.prod(value.shape[:-1])
    kept = _kept(CELLS[mode], size, steps, layers, directions, dropout) * value.itemsize if train else 0
    return result, torch.empty_like(hidden), after, value.new_empty(kept, dtype=torch.uint8), value.new_empty(0)


def _kept(cell: Cell, size: int, steps: int, layers: int, directions: int, dropout: float) -> int:
    each = layers * directions * steps * size
    masks = (layers - 1) * directions * steps * size if dropout else 0
    return each * cell.kept + masks


def backward(
    value: Tensor,
    weights: Sequence[Tensor],
    stride: int,
    buffer: Tensor,
    hidden: Tensor,
    of_cell: Tensor | None,
    output: Tensor,
    gradient: Tensor | None,
    *rest: Any,
) -> tuple[Any, ...]:
    """Empty results of `_cudnn_rnn_backward`: the weights' gradients are parts of one piece.

    Args:
        value, weights, stride, buffer, hidden, of_cell, output, gradient, rest: as the operator has them.
    """
    whole = value.new_empty(sum(weight.numel() for weight in weights))
    sizes = [weight.numel() for weight in weights]
    parts = [part.view(weight.shape) for part, weight in zip(whole.split(sizes), weights, strict=True)]
    of_value = torch.empty_like(value, memory_format=torch.contiguous_format)
    return of_value, torch.empty_like(hidden), None if of_cell is None else torch.empty_like(of_cell), parts


def workspace(target: Target, release: tuple[int, int], value: Tensor, *rest: Any, **options: Any) -> int:
    """The gates of one layer before they are applied, for all steps at once.

    Args:
        target, release: whose kernel it is, and of which torch.
        value: what the layer is given.
        rest, options: further arguments of the operator.

    Returns:
        Bytes.
    """
    mode, size, bidirectional = _mode_size_directions(rest)
    steps = math.prod(value.shape[:-1])
    return rounded((2 if bidirectional else 1) * steps * CELLS[mode].gates * size * value.itemsize)


def _mode_size_directions(rest: Sequence[Any]) -> tuple[int, int, bool]:
    """Of either operator: its integers and booleans after the tensors come in the same order."""
    numbers = [item for item in rest if isinstance(item, (int, float))]  # stride, mode, size, projected, layers, ...
    return int(numbers[1]), int(numbers[2]), bool(numbers[8])


EMULATED: dict[Any, Callable[..., Any]] = {
    **{_LAYERS[cell.mode].input: layer(cell) for cell in CELLS.values()},
    **{_LAYERS[cell.mode].data: packed_layer(cell) for cell in CELLS.values()},
}
"""Recurrent layers, and what takes their place."""

STANDING_IN: dict[Any, Callable[..., Any]] = {
    _aten._cudnn_rnn.default: forward,
    _aten._cudnn_rnn_backward.default: backward,
}
"""Operators of cuDNN, and kernels on fakes that leave what they leave."""
