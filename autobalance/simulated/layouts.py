"""Strides of results where fakes, which torch derives from decompositions, have others than the kernels leave.

A wrong stride is a wrong size: whether a later operation copies its operand depends on it. Gradients that come back
through a transpose, and channels-last images, show the difference. What is right is what real elements on a simulated
device get; operators that work element by element let their first operand decide, as everywhere in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.simulated.dispatch import emulate

_aten = torch.ops.aten


def register() -> None:
    """Let fakes of the results of these operators have the strides that real ones have."""
    for func, model in LAYOUTS.items():
        emulate(func, _laid_out(func, model))


def _contiguous(gradient: Tensor, *rest: Any, **options: Any) -> Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


def _contiguous_as_input(gradient: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _like_gradient(gradient: Tensor, *rest: Any, **options: Any) -> Tensor:
    return torch.empty_like(gradient)


def _in_format_of_input(gradient: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    channels_last = not value.is_contiguous() and value.dim() == 4
    if channels_last and value.is_contiguous(memory_format=torch.channels_last):
        return torch.empty_like(value, memory_format=torch.channels_last)
    return _contiguous_as_input(gradient, value)


def _in_format_of_first(value: Tensor, *rest: Any, **options: Any) -> Tensor:
    return _in_format_of_input(value, value)


LAYOUTS: dict[Any, Callable[..., Tensor]] = {
    _aten.native_group_norm.default: _in_format_of_first,
    _aten.native_layer_norm_backward.default: _contiguous,
    _aten._log_softmax_backward_data.default: _contiguous,
    _aten.glu_backward.default: _contiguous_as_input,
    _aten.native_group_norm_backward.default: _in_format_of_input,
    _aten.native_batch_norm_backward.default: _in_format_of_input,
    _aten.reflection_pad2d_backward.default: _in_format_of_input,
    _aten.native_dropout_backward.default: _like_gradient,
    _aten.elu_backward.default: _like_gradient,
    _aten.hardswish_backward.default: _like_gradient,
    _aten.softplus_backward.default: _like_gradient,
}
"""Operators, and an empty tensor with the strides of their first result."""


def _laid_out(func: Any, model: Callable[..., Tensor]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        first = results if isinstance(results, Tensor) else results[0]
        if first is None or not compat.is_fake(first):
            return results
        wanted = model(*args, **kwargs).stride()
        if first.stride() != wanted:
            first = first.new_empty_strided(first.shape, wanted)
        return first if isinstance(results, Tensor) else (first, *results[1:])

    return kernel
